"""What `dagster dev` shows of a queue that it works on: asked for in GraphQL, as its UI does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dagster_dev import instance_view as view
from tests.dagster_dev.fabric import Fabric, log_of
from tests.dagster_dev.staged_work import give_cue, item

NUMBERS = {"depth", "active", "delayed", "dead", "oldest_age_seconds", "throughput_per_minute", "lag"}
CHECKS = {"no_expired_leases", "dead_letters_empty", "backpressure_clear", "replication_lag", "peers_healthy"}

pytestmark = [
    pytest.mark.parametrize("fabric", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True),
    pytest.mark.timeout(900),
]


def test_a_queue_is_drained_and_all_of_it_can_be_seen(fabric: Fabric) -> None:
    dev, queue = fabric.dev, fabric.queue("landing")
    queue.enqueue([item(f"f{n}", "wait", n) for n in range(5)])

    actor = fabric.actor("bronze")  # the work sensor has launched a run, which now holds its leases
    owner = f"dagster/{actor.run}/bronze"
    dev.until(lambda: any(look["active"] == 5 for look in view.observations(dev, "queues", "landing")), every=0.5)
    held = next(look for look in view.observations(dev, "queues", "landing") if look["active"] == 5)
    assert held.keys() >= NUMBERS
    assert all(isinstance(held[name], int | float) for name in NUMBERS)
    assert owner in str(held["leases"])

    give_cue(fabric.home, "bronze")
    assert view.wait_for_run(dev, actor.run) == "SUCCESS"
    [made] = view.materializations(dev, "bronze")
    [granted, *_] = [event for event in log_of(queue) if event.type == "LeaseGranted"]
    assert granted.token is not None
    assert (made["run"], made["omnirelay/owner"], made["omnirelay/queue"]) == (actor.run, owner, "landing")
    assert (made["omnirelay/attempt"], made["omnirelay/items"]) == (1, 5)
    assert made["omnirelay/lease"] == granted.token.lease_id
    assert made["omnirelay/fence"] == max(event.token.fence for event in log_of(queue) if event.token)
    assert sorted(row["name"] for row in fabric.outputs("landing").load("bronze")) == [f"f{n}" for n in range(5)]

    dev.until(lambda: view.observations(dev, "queues", "landing")[0]["active"] == 0, every=0.5)
    assert any(look["throughput_per_minute"] > 0 for look in view.observations(dev, "queues", "landing"))


def test_checks_say_what_is_wrong_and_that_it_is_right_again(fabric: Fabric) -> None:
    dev, queue = fabric.dev, fabric.queue("landing")
    dev.until(lambda: view.checks(dev, "queues", "landing").keys() == CHECKS, every=0.5)
    dev.until(lambda: all(check["success"] for check in view.checks(dev, "queues", "landing").values()), every=0.5)
    queue.enqueue([item("poison")])
    queue.fail(queue.lease("somebody")[0].token, "nobody can read this", requeue=False)
    dev.until(lambda: not view.checks(dev, "queues", "landing")["dead_letters_empty"]["success"], every=0.5)
    said = view.checks(dev, "queues", "landing")["dead_letters_empty"]
    assert "requeue" in said["description"]
    queue.purge_dead([dead.sequence_id for dead in queue.dead_letters()])
    dev.until(lambda: view.checks(dev, "queues", "landing")["dead_letters_empty"]["success"], every=0.5)


def test_sensor_ticks_say_what_they_did(fabric: Fabric) -> None:
    dev = fabric.dev
    for sensor in ("landing_observation_sensor", "landing_work_sensor", "landing_run_status_silent"):
        ticks = view.ticks(dev, sensor, view.SECOND_LOCATION)
        assert ticks
        assert {tick["error"] for tick in ticks} == {None}
        assert all(tick["cursor"] for tick in ticks)
    work = view.ticks(dev, "landing_work_sensor", view.SECOND_LOCATION)
    launching = [tick for tick in work if tick["runIds"]]
    assert {made["run"] for made in view.materializations(dev, "bronze")} == {
        run for tick in launching for run in tick["runIds"]
    }
    assert all('"runs_launched": 1' in tick["cursor"] for tick in launching)
    assert any("no work" in (tick["skipReason"] or "") for tick in work)


@pytest.fixture(scope="module", autouse=True)
def once_seen(fabric: Fabric) -> Iterator[None]:
    """They are on from the start, as everywhere; once all is seen they would only take time from others."""
    yield
    for sensor in (
        "observation_sensor",
        "work_sensor",
        *(f"run_status_{of}" for of in ("failed", "canceled", "silent")),
    ):
        view.stop_sensor(fabric.dev, f"landing_{sensor}", view.SECOND_LOCATION)
