"""Run status sensors, against a real instance: what dead runs hold goes back, and live runs are left alone."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status

from lease_core import Lease, LeaseQueue, WorkItem
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.sensors import build_run_status_sensors
from omnirelay_dagster.sensors.silent_runs import Suspect, _judge, _Seen


@pytest.fixture
def queue(resource: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(resource.url, "landing") as opened:
        opened.enqueue([WorkItem(resource_type="file", resource_id=f"f{number}") for number in range(10)])
        yield opened


def tick(sensor: dg.SensorDefinition, resource: Any, instance: Any, cursor: str | None = None) -> Any:
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources={"landing": resource}) as context:
        return sensor.evaluate_tick(context)


@dg.op
def load() -> None: ...


@dg.job(name="nightly")
def nightly() -> None:
    load()


def begin_run(instance: dg.DagsterInstance) -> dg.DagsterRun:
    """A run that is at its one step, as the event log has it when the process is killed."""
    run = instance.create_run_for_job(nightly, status=Status.STARTED)
    report(instance, run, dg.DagsterEventType.STEP_START)
    return run


def report(instance: dg.DagsterInstance, run: dg.DagsterRun, kind: dg.DagsterEventType) -> None:
    data = None
    if kind == dg.DagsterEventType.STEP_FAILURE:
        from dagster._core.execution.plan.objects import StepFailureData

        data = StepFailureData(error=None, user_failure_data=None)
    event = dg.DagsterEvent(
        event_type_value=kind.value,
        job_name=run.job_name,
        step_key="load",
        event_specific_data=data,
        message=kind.value,
    )
    instance.report_dagster_event(event, run.run_id)


def lease_for(queue: LeaseQueue, run: dg.DagsterRun, count: int = 1, duration: float = 60.0) -> list[Lease]:
    return queue.lease(f"dagster/{run.run_id}/load", count, duration=duration)


def end_run(instance: dg.DagsterInstance, run: dg.DagsterRun, status: Status) -> None:
    if status == Status.FAILURE:
        instance.report_run_failed(run)
    else:
        instance.report_run_canceled(run)


@pytest.mark.parametrize(("index", "status"), [(0, Status.FAILURE), (1, Status.CANCELED)])
def test_a_run_that_ended_badly_gives_everything_back_at_once(
    resource: Any, queue: Any, instance: Any, index: int, status: Status
) -> None:
    sensor = build_run_status_sensors("landing")[index]
    cursor = tick(sensor, resource, instance).cursor
    run, other = begin_run(instance), begin_run(instance)
    held = lease_for(queue, run, 4)
    lease_for(queue, other, 3)
    end_run(instance, run, status)
    found = tick(sensor, resource, instance, cursor)
    assert [reaction.error for reaction in found.dagster_run_reactions] == [None]
    assert (queue.stats().pending, queue.stats().active) == (7, 3)
    assert all(lease.owner_peer_id.startswith(f"dagster/{other.run_id}") for lease in queue.leases())
    assert not queue.complete([lease.token for lease in held]).accepted, "a surviving process cannot publish"
    assert tick(sensor, resource, instance, found.cursor).dagster_run_reactions == []


def test_a_real_run_that_fails_leaves_nothing_held(resource: Any, queue: Any, instance: Any) -> None:
    @leased_asset(queue="landing", batch_size=5)
    def broken(context: dg.AssetExecutionContext, batch: Any) -> None:
        queue.lease(f"dagster/{context.run.run_id}/broken", 2)  # what a killed process would leave behind
        raise RuntimeError("boom")

    sensor = build_run_status_sensors("landing")[0]
    cursor = tick(sensor, resource, instance).cursor
    assert not dg.materialize(
        [broken], instance=instance, resources={"landing": resource}, raise_on_error=False
    ).success
    assert queue.stats().active == 2
    tick(sensor, resource, instance, cursor)
    assert queue.stats().active == 0


def test_what_the_status_sensors_missed_is_handed_back(resource: Any, queue: Any, instance: Any) -> None:
    run, alive = begin_run(instance), begin_run(instance)
    lease_for(queue, run, 2)
    lease_for(queue, alive, 1)
    queue.lease("dagster/run-of-another-instance/load", 1)
    queue.lease("somebody else", 1)
    instance.report_run_failed(run)
    found = tick(build_run_status_sensors("landing")[2], resource, instance)
    assert "2 items handed back" in found.skip_message
    assert queue.stats().active == 3


def silent(**arguments: Any) -> dg.SensorDefinition:
    return build_run_status_sensors("landing", grace_seconds=0.2, **arguments)[2]


def die(queue: LeaseQueue, run: dg.DagsterRun) -> None:
    lease_for(queue, run, 1, duration=0.05)
    time.sleep(0.4)


def test_a_run_that_died_unseen_is_reported_failed_and_its_slot_freed(resource: Any, queue: Any, instance: Any) -> None:
    storage = instance.event_log_storage
    storage.set_concurrency_slots("ingest", 1)
    run = begin_run(instance)
    assert storage.claim_concurrency_slot("ingest", run.run_id, "load").is_claimed
    die(queue, run)
    first = tick(silent(report_dead_runs=True), resource, instance)
    # its lease was found expired by this very tick; only then does the grace begin
    assert list(json.loads(first.cursor)["suspects"]) == [run.run_id]
    assert instance.get_run_by_id(run.run_id).status == Status.STARTED
    time.sleep(0.3)
    second = tick(silent(report_dead_runs=True), resource, instance, first.cursor)
    assert instance.get_run_by_id(run.run_id).status == Status.FAILURE
    assert "1 runs reported failed" in second.skip_message
    assert storage.get_concurrency_info("ingest").active_slot_count == 0
    assert json.loads(second.cursor)["suspects"] == {}


def test_by_default_it_is_only_said_to_be_dead(resource: Any, queue: Any, instance: Any) -> None:
    run = begin_run(instance)
    die(queue, run)
    first = tick(silent(), resource, instance)
    time.sleep(0.3)
    second = tick(silent(), resource, instance, first.cursor)
    assert "1 runs seem dead" in second.skip_message
    assert instance.get_run_by_id(run.run_id).status == Status.STARTED


def test_a_run_heard_of_in_the_queue_is_alive(resource: Any, queue: Any, instance: Any) -> None:
    run = begin_run(instance)
    die(queue, run)
    cursor = tick(silent(report_dead_runs=True), resource, instance).cursor
    lease_for(queue, run, 1)
    time.sleep(0.3)
    found = tick(silent(report_dead_runs=True), resource, instance, cursor)
    assert json.loads(found.cursor)["suspects"] == {}
    assert instance.get_run_by_id(run.run_id).status == Status.STARTED


def test_a_run_heard_of_in_dagster_is_alive(resource: Any, queue: Any, instance: Any) -> None:
    run = begin_run(instance)
    die(queue, run)
    cursor = tick(silent(report_dead_runs=True), resource, instance).cursor
    time.sleep(0.3)
    instance.report_engine_event("still here", run, step_key="load")
    found = tick(silent(report_dead_runs=True), resource, instance, cursor)
    assert "0 runs reported failed" in found.skip_message
    assert instance.get_run_by_id(run.run_id).status == Status.STARTED


def test_a_step_that_dagster_saw_end_is_no_evidence(resource: Any, queue: Any, instance: Any) -> None:
    run = begin_run(instance)
    die(queue, run)
    report(instance, run, dg.DagsterEventType.STEP_FAILURE)
    found = tick(silent(report_dead_runs=True), resource, instance)
    assert json.loads(found.cursor)["suspects"] == {}


def test_a_run_without_leases_is_none_of_its_business(resource: Any, queue: Any, instance: Any) -> None:
    run = begin_run(instance)
    time.sleep(0.3)
    found = tick(silent(report_dead_runs=True), resource, instance)
    assert "0 runs reported failed" in found.skip_message
    assert instance.get_run_by_id(run.run_id).status == Status.STARTED


def test_how_long_ago_a_lease_expired_goes_by_the_queues_clock(instance: dg.DagsterInstance) -> None:
    run = begin_run(instance)
    time.sleep(0.3)
    expired = datetime.now(UTC) - timedelta(hours=1)  # just now, by a database whose clock is an hour behind
    seen = _Seen(0, {run.run_id: Suspect("load", expired)})
    grace = timedelta(seconds=0.2)
    assert _judge(instance, seen, grace, expired + grace / 2) == []
    assert [step for _, step in _judge(instance, seen, grace, expired + 2 * grace)] == ["load"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"queue": "context"}, "queue: must be the key"),
        ({"queue": "landing", "grace_seconds": -1}, "grace_seconds: must be a number of seconds above 0"),
        ({"queue": "landing", "report_dead_runs": "yes"}, "report_dead_runs: must be True or False"),
        ({"queue": "landing", "name": "a/b"}, "name: must be letters"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        build_run_status_sensors(**arguments)


def test_their_names_say_whose_they_are() -> None:
    assert [sensor.name for sensor in build_run_status_sensors("landing")] == [
        "landing_run_status_failed",
        "landing_run_status_canceled",
        "landing_run_status_silent",
    ]
