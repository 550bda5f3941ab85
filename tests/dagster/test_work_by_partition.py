"""Partitioned leased assets: runs take the items of their partition, and the work sensor launches them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster import LeaseQueueResource, build_work_sensor, lease_queue_definitions, leased_asset, leased_op

REGIONS = dg.StaticPartitionsDefinition(["ap", "eu", "us"])
TENANTS = dg.DynamicPartitionsDefinition(name="tenants")


@leased_asset(queue="landing", batch_size=10, by_partition=True, partitions_def=REGIONS)
def by_region(context: dg.AssetExecutionContext, batch: Any) -> list[str]:
    return [f"{context.partition_key}:{item.resource_id}" for item in batch.items]


@leased_asset(queue="landing", by_partition=True, partitions_def=TENANTS)
def by_tenant(batch: Any) -> None: ...


@leased_asset(queue="landing", batch_size=10, partitions_def=REGIONS)
def next_in_line(batch: Any) -> list[str]:
    return [item.resource_id for item in batch.items]


@leased_asset(queue="landing")
def unpartitioned(batch: Any) -> None: ...


@pytest.fixture
def queue(resource: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(resource.url, resource.namespace) as opened:
        yield opened


def put(queue: LeaseQueue, *keys: str | None) -> None:
    queue.enqueue([WorkItem("file", f"f{number}", partition_key=key) for number, key in enumerate(keys)])


def tick(sensor: dg.SensorDefinition, asset: Any, resource: Any, instance: dg.DagsterInstance) -> Any:
    """A tick as the daemon has it: requests are resolved against the target, unknown partitions would be refused."""
    defs = dg.Definitions(assets=[asset], sensors=[sensor], resources={"landing": resource})
    repository = defs.get_repository_def()
    with dg.SensorEvaluationContext(
        instance_ref=instance.get_ref(),
        last_tick_completion_time=None,
        last_run_key=None,
        cursor=None,
        log_key=None,
        repository_name=repository.name,
        repository_def=repository,
        sensor_name=sensor.name,
        resources=repository.get_top_level_resources(),
    ) as context:
        return repository.get_sensor_def(sensor.name).evaluate_tick(context)


def partitions(found: Any) -> list[str | None]:
    return [request.partition_key for request in found.run_requests]


def run(asset: Any, resource: Any, partition: str) -> Any:
    return dg.materialize([asset], resources={"landing": resource}, partition_key=partition)


def test_a_run_takes_the_items_of_its_partition_only(resource: Any, queue: Any) -> None:
    put(queue, "eu", "us", "eu", None)
    assert run(by_region, resource, "eu").output_for_node("by_region") == ["eu:f0", "eu:f2"]
    empty = run(by_region, resource, "eu")
    assert empty.success
    assert empty.asset_materializations_for_node("by_region") == []
    assert queue.stats().pending == 2


def test_without_by_partition_a_run_takes_what_is_next(resource: Any, queue: Any) -> None:
    put(queue, "eu", "us")
    assert run(next_in_line, resource, "us").output_for_node("next_in_line") == ["f0", "f1"]


def test_an_op_takes_the_items_of_its_partition(resource: Any, queue: Any) -> None:
    @leased_op(queue="landing", by_partition=True)
    def work(batch: Any) -> list[str]:
        return [item.resource_id for item in batch.items]

    @dg.job(partitions_def=REGIONS, resource_defs={"landing": resource.get_resource_definition()})
    def working() -> None:
        work()

    put(queue, "eu", "us")
    assert working.execute_in_process(partition_key="us").output_for_node("work") == ["f1"]


def test_a_run_for_each_partition_that_has_work(resource: Any, queue: Any, instance: Any) -> None:
    put(queue, "us", "eu", "us")
    sensor = build_work_sensor("landing", target=by_region, max_concurrent_runs=5)
    found = tick(sensor, by_region, resource, instance)
    assert partitions(found) == ["us", "eu"]
    assert json.loads(found.cursor)["partitions"] == {"us": 2, "eu": 1}
    for request in found.run_requests:
        assert run(by_region, resource, request.partition_key).success
    assert queue.stats().completed == 3
    assert "no work" in tick(sensor, by_region, resource, instance).skip_message


@pytest.mark.parametrize(
    "target",
    [
        {"target": dg.AssetSelection.assets("by_region")},
        {"asset_selection": ["by_region"]},
        {"job": dg.define_asset_job("regional", "by_region")},
    ],
    ids=["selection", "asset_selection", "job"],
)
def test_a_target_that_is_only_named_is_looked_up(target: Any, resource: Any, queue: Any, instance: Any) -> None:
    put(queue, "us", "eu", "us")
    sensor = build_work_sensor("landing", max_concurrent_runs=5, **target)
    assert partitions(tick(sensor, by_region, resource, instance)) == ["us", "eu"]


def test_every_partition_has_a_run_before_one_has_two(resource: Any, queue: Any, instance: Any) -> None:
    put(queue, *["eu"] * 5, "us", "ap")

    def launched(most: int) -> list[str | None]:
        sensor = build_work_sensor("landing", target=by_region, items_per_run=2, max_concurrent_runs=most)
        return partitions(tick(sensor, by_region, resource, instance))

    assert launched(1) == ["eu"]
    assert launched(4) == ["eu", "us", "ap", "eu"]
    assert launched(9) == ["eu", "us", "ap", "eu", "eu"]


def test_a_run_about_to_begin_is_left_the_work_of_its_partition(resource: Any, queue: Any, instance: Any) -> None:
    put(queue, "eu", "us")
    sensor = build_work_sensor("landing", target=by_region, max_concurrent_runs=5)
    first = tick(sensor, by_region, resource, instance)
    job = dg.Definitions(assets=[by_region], resources={"landing": resource}).resolve_implicit_global_asset_job_def()
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.NOT_STARTED, tags=dict(first.run_requests[0].tags))
    assert partitions(tick(sensor, by_region, resource, instance)) == ["us"]


def test_keys_that_are_no_partition_are_left_alone_and_named(resource: Any, queue: Any, instance: Any) -> None:
    put(queue, "mars", None, "eu")
    sensor = build_work_sensor("landing", target=by_region, max_concurrent_runs=5)
    defs = dg.Definitions(assets=[by_region], sensors=[sensor], resources={"landing": resource})
    with dg.build_sensor_context(instance=instance, definitions=defs, resources={"landing": resource}) as context:
        warned: list[str] = []
        context.log.warning = lambda text, *_, **__: warned.append(text)  # type: ignore[method-assign]
        found = sensor.evaluate_tick(context)
    assert partitions(found) == ["eu"]
    assert "2 items wait under a partition_key that is no partition of the target" in warned[0]
    assert "'mars', None" in warned[0]


def test_dynamic_partitions_are_added_as_items_come(resource: Any, queue: Any, instance: Any) -> None:
    instance.add_dynamic_partitions("tenants", ["old"])
    put(queue, "old", "new", "b\tad")
    sensor = build_work_sensor("landing", target=by_tenant, max_concurrent_runs=5)
    found = tick(sensor, by_tenant, resource, instance)
    assert partitions(found) == ["old", "new"]
    [added] = found.dynamic_partitions_requests
    assert (added.partitions_def_name, list(added.partition_keys)) == ("tenants", ["new"])


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        (dg.DailyPartitionsDefinition("2026-01-01"), "2026-03-01", "2025-01-01"),
        (dg.MultiPartitionsDefinition({"a": REGIONS, "b": dg.StaticPartitionsDefinition(["1"])}), "eu|1", "eu"),
    ],
    ids=["daily", "multi"],
)
def test_other_partitions(definition: Any, good: str, bad: str, resource: Any, queue: Any, instance: Any) -> None:
    @leased_asset(queue="landing", by_partition=True, partitions_def=definition)
    def partitioned(batch: Any) -> None: ...

    put(queue, bad, good)
    sensor = build_work_sensor("landing", target=partitioned, max_concurrent_runs=5)
    assert partitions(tick(sensor, partitioned, resource, instance)) == [good]
    assert run(partitioned, resource, good).success
    assert queue.stats().completed == 1


@pytest.mark.parametrize("given", ["eu", lambda context: "eu"], ids=["key", "function"])
def test_one_partition_for_all_runs(given: Any, resource: Any, queue: Any, instance: Any) -> None:
    put(queue, None, "us", "eu")
    sensor = build_work_sensor(
        "landing", target=next_in_line, partition_key=given, items_per_run=2, max_concurrent_runs=5
    )
    found = tick(sensor, next_in_line, resource, instance)
    assert partitions(found) == ["eu", "eu"]
    assert {request.tags["dagster/partition"] for request in found.run_requests} == {"eu"}


def test_a_function_that_gives_no_partition_fails_the_tick(resource: Any, queue: Any, instance: Any) -> None:
    put(queue, None)
    sensor = build_work_sensor("landing", target=next_in_line, partition_key=lambda context: None)
    with pytest.raises(Exception, match="partition_key gave None"):
        tick(sensor, next_in_line, resource, instance)


def test_the_queue_definitions_see_it_by_themselves(resource: Any, queue: Any, instance: Any) -> None:
    put(queue, "us", "eu")
    defs = dg.Definitions.merge(
        dg.Definitions(assets=[by_region], resources={"landing": resource}),
        lease_queue_definitions(queue="landing", asset=by_region, work={"max_concurrent_runs": 5}),
    )
    sensor = defs.get_repository_def().get_sensor_def("landing_work_sensor")
    with dg.build_sensor_context(instance=instance, definitions=defs, resources={"landing": resource}) as context:
        assert partitions(sensor.evaluate_tick(context)) == ["us", "eu"]


@pytest.mark.parametrize(
    ("target", "arguments", "said"),
    [
        (next_in_line, {}, "partition_key: next_in_line has partitions, so say which its runs are for"),
        (next_in_line, {"partitions_def": REGIONS}, "partitions_def: next_in_line takes whatever is next in line"),
        (unpartitioned, {"partitions_def": REGIONS}, "partitions_def: unpartitioned takes whatever is next in line"),
        (by_region, {"partition_key": "eu"}, "partition_key: by_region leases by partition"),
        (next_in_line, {"partition_key": "eu", "partitions_def": REGIONS}, "give one of them, not both"),
        (next_in_line, {"partition_key": 3}, "partition_key: must be a partition, or a function"),
        (next_in_line, {"partition_key": ""}, "partition_key: must be a partition, or a function"),
        (by_region, {"partitions_def": "regions"}, "partitions_def: must be a dg.PartitionsDefinition"),
    ],
)
def test_what_cannot_work_is_refused(target: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        build_work_sensor("landing", target=target, **arguments)
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        lease_queue_definitions(queue="landing", asset=target, work=arguments)


def test_leasing_by_partition_needs_partitions() -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="by_partition: needs the asset's partitions"):
        leased_asset(queue="landing", by_partition=True)
