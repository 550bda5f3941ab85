"""What becomes of leases when a run fails, is ended or dies, under a running instance: the table of docs/guarantees.md.

SIGKILL at random is in test_killed_at_random, of everything in test_killed_altogether, and a step that was paused in
test_taken_over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest

from lease_core import LeaseEvent
from tests.dagster_dev import instance_view as view
from tests.dagster_dev.fabric import Fabric, counts, log_of
from tests.dagster_dev.staged_work import Actor, give_cue, item

BATCH = 5

pytestmark = [
    pytest.mark.parametrize("fabric", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True),
    pytest.mark.timeout(900),
]


class Ending(NamedTuple):
    """A way to end a run, and how the run is to end by it."""

    end: Callable[[Fabric, Actor], None]
    status: str
    says: str


def _kill(who: str, number: signal.Signals) -> Callable[[Fabric, Actor], None]:
    return lambda fabric, actor: os.kill(actor.step if who == "step" else actor.worker, number)


ENDINGS = {
    "terminated in the UI": Ending(lambda fabric, actor: view.terminate(fabric.dev, actor.run), "CANCELED", ""),
    "SIGTERM of the run worker": Ending(_kill("run worker", signal.SIGTERM), "FAILURE", "interrupted unexpectedly"),
    "SIGKILL of the step": Ending(_kill("step", signal.SIGKILL), "FAILURE", "terminated by signal 9"),
    "SIGKILL of the run worker": Ending(_kill("run worker", signal.SIGKILL), "FAILURE", "terminated by signal 9"),
    "out of time": Ending(lambda fabric, actor: fabric.dev.limit_runtime(actor.run, 1), "FAILURE", "maximum runtime"),
}


class Ended(NamedTuple):
    """A run that was ended while it held a batch, and what the queue logged about that batch since."""

    actor: Actor
    status: str
    said: str
    events: list[LeaseEvent]


@pytest.fixture(scope="module")
def ended(fabric: Fabric) -> dict[str, Ended]:
    """A run for each way to end one, all at work at the same time, and then ended."""
    with fabric.sensing(*(f"matrix_run_status_{of}" for of in ("failed", "canceled", "silent"))):
        return _end_in_every_way(fabric)


def _end_in_every_way(fabric: Fabric) -> dict[str, Ended]:
    dev, queue = fabric.dev, fabric.queue("matrix")
    queue.enqueue([item(f"m{n}", "wait", n) for n in range(BATCH * len(ENDINGS))])
    for _ in ENDINGS:
        view.launch(dev, "troubled_job")
    crowd = fabric.actors("troubled", len(ENDINGS))
    for actor, ending in zip(crowd, ENDINGS.values(), strict=True):
        ending.end(fabric, actor)
    dev.until(lambda: queue.stats().active == 0)
    found = {}
    for actor, name in zip(crowd, ENDINGS, strict=True):
        status = view.wait_for_run(dev, actor.run)
        own = [event for event in log_of(queue) if event.peer_id == f"dagster/{actor.run}/troubled"]
        found[name] = Ended(actor, status, view.said(dev, actor.run), own)
    return found


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_that_is_ended_gives_its_work_back_and_no_attempt_is_used(ended: dict[str, Ended], name: str) -> None:
    ending, found = ENDINGS[name], ended[name]
    assert found.status == ending.status
    assert ending.says in found.said
    assert counts(found.events)["Released"] == BATCH
    assert not counts(found.events).keys() & {"Expired", "Failed", "Completed", "DeadLettered"}


def test_what_was_given_back_is_done_once_by_others_and_never_by_a_step_that_outlived_its_run(
    fabric: Fabric, ended: dict[str, Ended]
) -> None:
    dev, queue = fabric.dev, fabric.queue("matrix")
    orphan = ended["SIGKILL of the run worker"].actor
    before = queue.stats().head
    for asset in ("troubled", "relieved"):
        give_cue(fabric.home, asset)
    dev.until(lambda: orphan.step not in {process.pid for process in dev.processes()})
    assert log_of(queue, before) == []
    assert view.materializations(dev, "troubled") == []

    successor = view.launch(dev, "relieved_job")
    assert view.wait_for_run(dev, successor) == "SUCCESS"
    rows = fabric.outputs("matrix").load("relieved")
    assert sorted(row["name"] for row in rows) == sorted(f"m{n}" for n in range(BATCH * len(ENDINGS)))
    completed = [event for event in log_of(queue, before) if event.type == "Completed"]
    assert {event.token.attempt for event in completed if event.token} == {1}
    [made] = view.materializations(dev, "relieved")
    assert (made["run"], made["omnirelay/items"]) == (successor, BATCH * len(ENDINGS))
    assert (made["omnirelay/owner"], made["omnirelay/attempt"]) == (f"dagster/{successor}/relieved", 1)


def test_a_body_that_raises_fails_its_items_and_dagsters_retry_leases_them_again(fabric: Fabric) -> None:
    dev, queue = fabric.dev, fabric.queue("retry")
    queue.enqueue([item(f"r{n}", "raise once", n) for n in range(BATCH)])
    run = view.launch(dev, "retried_job")
    assert view.wait_for_run(dev, run) == "SUCCESS"
    failed = [event for event in log_of(queue) if event.type == "Failed"]
    assert len(failed) == BATCH
    assert all("ValueError: cannot read r" in (event.error or "") for event in failed)
    assert "ExecutionStepUpForRetryEvent" in view.recorded(dev, run)
    [made] = view.materializations(dev, "retried")
    assert (made["omnirelay/attempt"], made["omnirelay/items"]) == (2, BATCH)
    assert len(fabric.outputs("retry").load("retried")) == BATCH


def test_a_failure_without_retries_is_dead_lettered_at_once(fabric: Fabric) -> None:
    dev, queue = fabric.dev, fabric.queue("refusal")
    queue.enqueue([item(f"h{n}", "give up", n) for n in range(BATCH)])
    run = view.launch(dev, "hopeless_job")
    assert view.wait_for_run(dev, run) == "FAILURE"
    dead = queue.dead_letters()
    assert len(dead) == BATCH
    assert all("nobody can read this" in (each.last_error or "") and each.attempt == 1 for each in dead)
    assert view.materializations(dev, "hopeless") == []
