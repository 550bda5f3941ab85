"""The queue as an asset: what its sensor observes, remembers and reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from lease_core import WorkItem
from omnirelay_dagster import LeaseQueueResource, build_observation_sensor
from omnirelay_dagster.look import look_at, queue_asset_key, shown
from omnirelay_dagster.queue_asset import build_queue_asset

KEY = queue_asset_key("landing")
NUMBERS = {"depth", "active", "delayed", "dead", "oldest_age_seconds", "throughput_per_minute", "lag"}


@pytest.fixture
def instance(shared_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """One instance for all, for it takes a while to make, with nothing in it about the queue."""
    shared_instance.wipe_assets([KEY])
    return shared_instance


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[LeaseQueueResource]:
    resource = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", durability="relaxed")
    yield resource
    resource.get_queue().close()


def files(count: int, start: int = 0) -> list[WorkItem]:
    return [WorkItem("file", f"s3://raw/{number}.json") for number in range(start, start + count)]


def tick(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, cursor: str | None = None, **arguments: Any
) -> dg.SensorResult:
    """One tick of a fresh sensor, its events stored as the daemon would store them."""
    sensor = build_observation_sensor("landing", **arguments)
    copy = LeaseQueueResource(**landing.model_dump(exclude_none=True))  # the tick's teardown closes its queue
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources={"landing": copy}) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    return result


def seen(result: dg.SensorResult) -> dict[str, Any]:
    [observation] = [event for event in result.asset_events if isinstance(event, dg.AssetObservation)]
    return {name: getattr(value, "value", None) for name, value in observation.metadata.items()}


def leases_shown(result: dg.SensorResult) -> list[dict[str, Any]]:
    [observation] = [event for event in result.asset_events if isinstance(event, dg.AssetObservation)]
    table = observation.metadata["leases"]
    assert isinstance(table, dg.TableMetadataValue)
    return [dict(record.data) for record in table.records]


def checks_told(result: dg.SensorResult) -> dict[str, bool]:
    return {e.check_name: e.passed for e in result.asset_events if isinstance(e, dg.AssetCheckEvaluation)}


def test_the_asset_is_external_and_says_whose_it_is() -> None:
    spec = build_queue_asset("landing")
    assert spec.key == dg.AssetKey(["queues", "landing"])
    assert spec.group_name == "queues"
    assert dg.Definitions(assets=[spec]).resolve_asset_graph().get(spec.key).is_external


def test_a_tick_is_one_observation_with_the_same_keys_however_the_queue_is(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    empty = tick(instance, landing)
    queue = landing.get_queue()
    queue.enqueue(files(10))
    queue.enqueue(WorkItem("file", "poison", priority=9))
    queue.fail(queue.lease("worker", 1), "bad", requeue=False)
    queue.lease("worker-1", 3)
    busy = tick(instance, landing, empty.cursor)
    assert set(seen(empty)) == set(seen(busy)) == {*NUMBERS, "leases"}
    assert {name: seen(empty)[name] for name in NUMBERS} == dict.fromkeys(NUMBERS, 0)
    assert seen(busy) | {"oldest_age_seconds": 0, "lag": 0, "leases": None} == {
        "depth": 7,
        "active": 3,
        "delayed": 0,
        "dead": 1,
        "oldest_age_seconds": 0,
        "throughput_per_minute": 0.0,
        "lag": 0,
        "leases": None,
    }
    assert len(instance.fetch_observations(KEY, limit=10).records) == 2


def test_the_table_has_a_row_for_each_batch_that_is_held(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    queue = landing.get_queue()
    queue.enqueue(files(5))
    queue.lease("worker-1", 3, duration=60)
    queue.lease("worker-2", 1, duration=50)
    first, second = leases_shown(tick(instance, landing))
    assert (first["owner"], first["work"], first["items"], first["attempt"]) == (
        "worker-2",
        "file s3://raw/3.json",
        1,
        1,
    )
    assert (second["owner"], second["work"], second["items"]) == ("worker-1", "file s3://raw/0.json", 3)
    assert first["since"] < first["expires"] < second["expires"]


def test_the_table_is_limited(instance: dg.DagsterInstance, landing: LeaseQueueResource) -> None:
    queue = landing.get_queue()
    queue.enqueue(files(70))
    for number in range(70):
        queue.lease(f"worker-{number}", 1)
    result = tick(instance, landing)
    assert len(leases_shown(result)) == 50
    assert seen(result)["active"] == 70


def test_what_comes_from_outside_is_escaped_and_cut(instance: dg.DagsterInstance, landing: LeaseQueueResource) -> None:
    queue = landing.get_queue()
    queue.enqueue(WorkItem("<script>", "a\nb\x1b[31m\u202e" + "x" * 900))
    queue.lease("<img src=x>", 1)
    [row] = leases_shown(tick(instance, landing))
    text = row["owner"] + row["work"]
    assert text.isprintable()
    assert "<" not in text
    assert row["owner"] == "\\u003cimg src=x\\u003e"
    assert len(row["work"]) < 250


def test_shown_is_one_line_that_tells_everything_apart() -> None:
    assert shown("s3://raw/a b.json?x=1&y=ü") == "s3://raw/a b.json?x=1&y=ü"
    assert shown("\\u000a") != shown("\n")
    assert shown("x" * 500, 10) == "x" * 9 + "…"


def test_throughput_is_completions_a_minute_since_the_last_tick(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    queue = landing.get_queue()
    queue.enqueue(files(20))
    before = tick(instance, landing)
    queue.complete(queue.lease("worker", 20))
    time.sleep(0.2)
    after = tick(instance, landing, before.cursor)
    assert 0 < seen(after)["throughput_per_minute"] <= 20 * 60 / 0.2
    assert seen(tick(instance, landing, after.cursor))["throughput_per_minute"] == 0.0


@pytest.mark.parametrize("cursor", ["", "17", "{}", '{"at": 3}', "nonsense"])
def test_a_cursor_that_makes_no_sense_starts_afresh(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, cursor: str
) -> None:
    assert seen(tick(instance, landing, cursor))["throughput_per_minute"] == 0.0


def test_a_younger_queue_under_an_old_cursor_shows_no_negative_numbers(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    old = '{"at":"2020-01-01T00:00:00Z","head":1000000,"completed":1000000}'
    result = tick(instance, landing, old)
    assert seen(result)["throughput_per_minute"] == 0.0
    assert seen(result)["lag"] == 0


def test_lag_is_the_slowest_readers_or_else_what_came_since_the_last_tick(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    queue = landing.get_queue()
    first = tick(instance, landing)
    queue.enqueue(files(4))
    assert seen(tick(instance, landing, first.cursor))["lag"] == 4
    queue.register_reader("fast", queue.stats().head)
    queue.register_reader("slow", 1)
    assert seen(tick(instance, landing, first.cursor))["lag"] == 3


def test_checks_are_told_at_first_then_on_change_and_again_after_a_while(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    queue = landing.get_queue()
    first = tick(instance, landing)
    assert checks_told(first) == {
        "no_expired_leases": True,
        "dead_letters_empty": True,
        "backpressure_clear": True,
        "replication_lag": True,
        "peers_healthy": True,
    }
    second = tick(instance, landing, first.cursor)
    assert checks_told(second) == {}
    queue.enqueue(files(1))
    queue.fail(queue.lease("worker"), "bad", requeue=False)
    third = tick(instance, landing, second.cursor)
    assert checks_told(third)["dead_letters_empty"] is False
    assert third.cursor is not None
    long_ago = third.cursor.replace('"checks_at":"2', '"checks_at":"1')
    assert len(checks_told(tick(instance, landing, long_ago))) == 5


def test_the_instance_knows_what_the_checks_said_without_a_run(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    queue = landing.get_queue()
    queue.enqueue(files(1))
    queue.fail(queue.lease("worker"), "bad", requeue=False)
    tick(instance, landing)
    key = dg.AssetCheckKey(KEY, "dead_letters_empty")
    latest = instance.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    assert latest.evaluation is not None
    assert not latest.evaluation.passed
    assert instance.get_runs_count() == 0


def test_looking_changes_nothing(instance: dg.DagsterInstance, landing: LeaseQueueResource) -> None:
    queue = landing.get_queue()
    queue.enqueue(files(3))
    queue.lease("worker", 1, duration=0.01)
    time.sleep(0.02)
    before = queue.stats().head
    look = look_at(queue, instance)
    assert len(look.expired) == 1
    assert look.silent_owners == {"worker"}
    assert queue.stats().head == before


def test_the_same_on_postgresql(instance: dg.DagsterInstance, postgres_url: str) -> None:
    landing = LeaseQueueResource(url=postgres_url, namespace="landing", auto_migrate=True)
    with landing.get_queue() as queue:
        queue.enqueue(files(4))
        queue.lease("worker", 1)
        queue.register_reader("slow", 2)
        result = tick(instance, landing)
    assert (seen(result)["depth"], seen(result)["active"], seen(result)["lag"]) == (3, 1, 3)
    assert [row["owner"] for row in leases_shown(result)] == ["worker"]
    assert all(checks_told(result).values())
