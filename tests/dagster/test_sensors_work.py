"""The work sensor, against a real instance: how many runs it asks for, and that these do the work once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus as Status
from dagster._core.remote_origin import RegisteredCodeLocationOrigin, RemoteRepositoryOrigin

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.sensors import build_work_sensor

SEEN: list[str] = []
ORIGIN = RemoteRepositoryOrigin(
    code_location_origin=RegisteredCodeLocationOrigin(location_name="fabric"), repository_name="__repository__"
).get_job_origin("bronze_job")


@leased_asset(queue="landing", batch_size=10)
def bronze(batch: Any) -> None:
    SEEN.extend(item.resource_id for item in batch.items)


bronze_job = dg.define_asset_job("bronze_job", [bronze])


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


@pytest.fixture
def queue(resource: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(resource.url, resource.namespace) as opened:
        yield opened


def definitions(sensor: dg.SensorDefinition, resource: LeaseQueueResource) -> dg.Definitions:
    return dg.Definitions(assets=[bronze], jobs=[bronze_job], sensors=[sensor], resources={"landing": resource})


def tick(
    sensor: dg.SensorDefinition, resource: LeaseQueueResource, instance: dg.DagsterInstance, cursor: str | None = None
) -> Any:
    with dg.build_sensor_context(
        instance=instance, cursor=cursor, definitions=definitions(sensor, resource), resources={"landing": resource}
    ) as context:
        return sensor.evaluate_tick(context)


def work(count: int, start: int = 0) -> list[WorkItem]:
    return [WorkItem(resource_type="file", resource_id=f"f{number}") for number in range(start, start + count)]


def execute(request: dg.RunRequest, resource: LeaseQueueResource, instance: dg.DagsterInstance) -> Any:
    job = dg.Definitions(assets=[bronze], jobs=[bronze_job], resources={"landing": resource}).resolve_job_def(
        "bronze_job"
    )
    return job.execute_in_process(instance=instance, tags=dict(request.tags), run_config=request.run_config)


def pretend_run(instance: dg.DagsterInstance, request: dg.RunRequest, status: Status, resource: Any) -> dg.DagsterRun:
    job = dg.Definitions(assets=[bronze], jobs=[bronze_job], resources={"landing": resource}).resolve_job_def(
        "bronze_job"
    )
    return instance.create_run_for_job(job, status=status, tags=dict(request.tags), remote_job_origin=ORIGIN)


def test_an_empty_queue_launches_nothing_and_says_why(resource: Any, instance: Any) -> None:
    found = tick(build_work_sensor("landing", job=bronze_job), resource, instance)
    assert found.run_requests == []
    assert "no work" in found.skip_message
    assert json.loads(found.cursor)["pending"] == 0


def test_every_item_is_worked_on_once_by_the_runs_it_launches(resource: Any, queue: Any, instance: Any) -> None:
    sensor = build_work_sensor("landing", job=bronze_job, items_per_run=10, max_concurrent_runs=2)
    queue.enqueue(work(25))
    cursor, launched = None, []
    for _ in range(6):
        found = tick(sensor, resource, instance, cursor)
        cursor = found.cursor
        for request in found.run_requests:
            assert execute(request, resource, instance).success
        launched.append(len(found.run_requests))
    assert launched == [2, 1, 0, 0, 0, 0]
    assert sorted(SEEN) == sorted(item.resource_id for item in work(25))
    assert queue.stats().completed == 25


def test_the_same_item_again_is_launched_again(resource: Any, queue: Any, instance: Any) -> None:
    """A run key would be remembered for ever and drop the second launch without a word."""
    sensor = build_work_sensor("landing", job=bronze_job)
    for _ in range(2):
        queue.enqueue(work(1))
        [request] = tick(sensor, resource, instance).run_requests
        assert request.run_key is None
        execute(request, resource, instance)
    assert SEEN == ["f0", "f0"]


def test_an_asset_can_be_the_target(resource: Any, queue: Any, instance: Any) -> None:
    queue.enqueue(work(1))
    for what in ({"target": bronze}, {"asset_selection": dg.AssetSelection.assets("bronze")}):
        [request] = tick(build_work_sensor("landing", **what), resource, instance).run_requests
        assert request.tags["omnirelay/work_sensor"] == "landing_work_sensor"


@pytest.mark.parametrize("status", [Status.QUEUED, Status.STARTING, Status.STARTED, Status.CANCELING])
def test_unfinished_runs_count(resource: Any, queue: Any, instance: Any, status: Status) -> None:
    sensor = build_work_sensor("landing", job=bronze_job, items_per_run=1, max_concurrent_runs=3)
    queue.enqueue(work(100))
    first = tick(sensor, resource, instance)
    assert len(first.run_requests) == 3
    pretend_run(instance, first.run_requests[0], status, resource)
    assert len(tick(sensor, resource, instance).run_requests) == 2
    for request in first.run_requests[1:]:
        pretend_run(instance, request, status, resource)
    full = tick(sensor, resource, instance)
    assert full.run_requests == []
    assert "max_concurrent_runs=3" in full.skip_message


def test_finished_runs_and_those_of_others_do_not_count(resource: Any, queue: Any, instance: Any) -> None:
    sensor = build_work_sensor("landing", job=bronze_job)
    queue.enqueue(work(1))
    [request] = tick(sensor, resource, instance).run_requests
    for status in (Status.SUCCESS, Status.FAILURE, Status.CANCELED):
        pretend_run(instance, request, status, resource)
    other = build_work_sensor("landing", job=bronze_job, name="another")
    [foreign] = tick(other, resource, instance).run_requests
    pretend_run(instance, foreign, Status.STARTED, resource)
    assert len(tick(sensor, resource, instance).run_requests) == 1


def test_runs_about_to_begin_are_left_the_work(resource: Any, queue: Any, instance: Any) -> None:
    sensor = build_work_sensor("landing", job=bronze_job, items_per_run=10, max_concurrent_runs=5)
    queue.enqueue(work(15))
    found = tick(sensor, resource, instance)
    assert len(found.run_requests) == 2
    for request in found.run_requests:
        pretend_run(instance, request, Status.QUEUED, resource)
    again = tick(sensor, resource, instance)
    assert again.run_requests == []
    assert "about to begin" in again.skip_message


def test_delayed_items_are_no_work_yet(resource: Any, queue: Any, instance: Any) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    queue.enqueue(WorkItem(resource_type="file", resource_id="later", not_before=later))
    found = tick(build_work_sensor("landing", job=bronze_job), resource, instance)
    assert found.run_requests == []
    assert "1 delayed" in found.skip_message


def test_leases_that_ran_out_are_work(resource: Any, queue: Any, instance: Any) -> None:
    queue.enqueue(work(3))
    queue.lease("dagster/gone/bronze", 3, duration=0.05)
    time.sleep(0.1)
    retrying = LeaseQueueResource(url=resource.url, namespace="landing", retry_delay=0)
    assert len(tick(build_work_sensor("landing", job=bronze_job), retrying, instance).run_requests) == 1


def test_a_run_that_fell_silent_does_not_stop_the_queue(resource: Any, queue: Any, instance: Any) -> None:
    queue.enqueue(work(2))
    patient = build_work_sensor("landing", job=bronze_job)
    hasty = build_work_sensor("landing", job=bronze_job, ignore_silent_runs_after=0.05)
    [request] = tick(patient, resource, instance).run_requests
    run = pretend_run(instance, request, Status.STARTED, resource)
    time.sleep(0.1)
    assert tick(patient, resource, instance).run_requests == []
    found = tick(hasty, resource, instance)
    assert len(found.run_requests) == 1
    assert json.loads(found.cursor)["runs_silent"] == 1
    queue.lease(f"dagster/{run.run_id}/bronze", 1)
    assert tick(hasty, resource, instance).run_requests == [], "it holds a lease, so it is alive"


def test_tags_and_run_config_reach_the_run(resource: Any, queue: Any, instance: Any) -> None:
    config = {"execution": {"config": {"in_process": {}}}}
    sensor = build_work_sensor("landing", job=bronze_job, tags={"team": "ingest"}, run_config=config)
    queue.enqueue(work(1))
    [request] = tick(sensor, resource, instance).run_requests
    assert request.tags["team"] == "ingest"
    assert request.run_config == config


def test_a_sensor_can_be_called_by_hand(resource: Any, queue: Any, instance: Any) -> None:
    queue.enqueue(work(1))
    sensor = build_work_sensor("landing", job=bronze_job)
    with dg.build_sensor_context(instance=instance, resources={"landing": resource}) as context:
        found = sensor(context)
    assert isinstance(found, dg.SensorResult)
    assert len(found.run_requests or []) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"queue": "not a key", "job": bronze_job}, "queue: must be the key of a LeaseQueueResource"),
        ({"queue": None, "job": bronze_job}, "queue: must be"),
        ({"queue": "landing"}, "give exactly one of them"),
        ({"queue": "landing", "job": bronze_job, "target": bronze}, r"got target, job"),
        ({"queue": "landing", "job": bronze_job, "max_concurrent_runs": 0}, "max_concurrent_runs: must be a whole"),
        ({"queue": "landing", "job": bronze_job, "items_per_run": -1}, "items_per_run: must be a whole number"),
        ({"queue": "landing", "job": bronze_job, "minimum_interval_seconds": 0}, "minimum_interval_seconds"),
        ({"queue": "landing", "job": bronze_job, "ignore_silent_runs_after": 0}, "ignore_silent_runs_after"),
        ({"queue": "landing", "job": bronze_job, "name": "a b"}, "name: must be letters"),
        ({"queue": "landing", "job": bronze_job, "default_status": "RUNNING"}, "default_status: must be"),
        ({"queue": "landing", "job": bronze_job, "tags": {"a": 1}}, "tags: must be a mapping"),
        ({"queue": "landing", "job": bronze_job, "tags": {"omnirelay/work_sensor": "x"}}, "leave it out"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        build_work_sensor(**arguments)


def test_a_queue_that_is_not_there_is_named(instance: Any) -> None:
    sensor = build_work_sensor("landing", job=bronze_job)
    with (
        dg.build_sensor_context(instance=instance) as context,
        pytest.raises(dg.DagsterInvalidDefinitionError, match="'landing' required by sensor 'landing_work_sensor'"),
    ):
        sensor.evaluate_tick(context)
