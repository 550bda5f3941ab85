"""The replication sensor, against a real instance: every event once, in few materializations and bounded ticks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.sensors import build_replication_sensor
from tests.sqlite_work import counted


@pytest.fixture
def resource(tmp_path: Path) -> LeaseQueueResource:
    return LeaseQueueResource(url=f"sqlite:///{tmp_path / 'fabric.db'}", namespace="landing", durability="relaxed")


@pytest.fixture
def queue(resource: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(resource.url, "landing", resource.queue_config()) as opened:
        yield opened


def tick(
    sensor: dg.SensorDefinition, resource: LeaseQueueResource, instance: dg.DagsterInstance, cursor: str | None = None
) -> Any:
    """One tick, and then what the daemon does with its result."""
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources={"landing": resource}) as context:
        found = sensor.evaluate_tick(context)
    for event in found.asset_events:
        instance.report_runless_asset_event(event)
    for request in found.dynamic_partitions_requests or []:
        instance.add_dynamic_partitions(request.partitions_def_name, request.partition_keys)
    return found


def catch_up(sensor: dg.SensorDefinition, resource: LeaseQueueResource, instance: dg.DagsterInstance) -> list[Any]:
    ticks = []
    cursor = None
    while not ticks or ticks[-1].asset_events:
        ticks.append(tick(sensor, resource, instance, cursor))
        cursor = ticks[-1].cursor
    return ticks


def numbers(event: dg.AssetMaterialization) -> dict[str, Any]:
    return {key.removeprefix("omnirelay/"): value.value for key, value in event.metadata.items()}


def enqueue(queue: LeaseQueue, kind: str, *ids: str) -> None:
    queue.enqueue([WorkItem(resource_type=kind, resource_id=name) for name in ids])


def test_one_materialization_for_each_type_with_counts_and_data_version(
    resource: Any, queue: Any, instance: Any
) -> None:
    enqueue(queue, "file", "a", "b", "c")
    enqueue(queue, "shard", "1")
    [lease] = queue.lease("worker", 1)
    queue.heartbeat(lease.token)
    queue.complete(lease.token)
    sensor = build_replication_sensor("landing")
    found = tick(sensor, resource, instance)
    assert found.cursor == "7"
    file, shard = found.asset_events
    assert (file.asset_key.path, shard.asset_key.path) == (["landing", "log", "file"], ["landing", "log", "shard"])
    assert file.tags["dagster/data_version"] == "7"
    said = numbers(file)
    assert (said["events"], said["first_sequence_number"], said["last_sequence_number"]) == (5, 1, 7)
    assert (said["events/Enqueued"], said["events/LeaseGranted"], said["events/Completed"]) == (3, 1, 1)
    assert "events/Heartbeat" not in said
    assert (said["pending"], said["active"], said["lag"], said["missed_events"]) == (3, 0, 0, 0)
    assert numbers(shard).keys() == said.keys(), "the same keys every time, so that they plot"
    again = tick(sensor, resource, instance, found.cursor)
    assert (again.asset_events, again.cursor) == ([], "7")
    assert "nothing new" in again.skip_message
    record = instance.get_latest_materialization_event(dg.AssetKey(["landing", "log", "file"]))
    assert record.asset_materialization.tags["dagster/data_version"] == "7"


def test_one_asset_for_the_namespace_of_chosen_events(resource: Any, queue: Any, instance: Any) -> None:
    enqueue(queue, "file", "a")
    sensor = build_replication_sensor("landing", granularity="namespace", asset_key="landed", event_types=["Completed"])
    found = tick(sensor, resource, instance)
    assert (found.asset_events, found.cursor) == ([], "1")
    queue.complete([lease.token for lease in queue.lease("worker", 1)])
    found = tick(sensor, resource, instance, found.cursor)
    [event] = found.asset_events
    assert event.asset_key == dg.AssetKey("landed")
    assert numbers(event)["events"] == 1


def test_resources_are_dynamic_partitions(resource: Any, queue: Any, instance: Any) -> None:
    parts = dg.DynamicPartitionsDefinition(name="files")
    sensor = build_replication_sensor(
        "landing", granularity="resource", asset_key=["raw", "files"], partitions_def=parts
    )
    enqueue(queue, "file", "s3://raw/a.json", "s3://raw/b.json")
    enqueue(queue, "file", "s3://raw/a.json", "what...\never%")
    found = tick(sensor, resource, instance)
    keys = ["file/s3://raw/a.json", "file/s3://raw/b.json", "file/what%2E..%0Aever%25"]
    assert [event.partition for event in found.asset_events] == keys
    assert list(instance.get_dynamic_partitions("files")) == keys
    assert instance.get_materialized_partitions(dg.AssetKey(["raw", "files"])) == set(keys)
    enqueue(queue, "file", "s3://raw/b.json")
    again = tick(sensor, resource, instance, found.cursor)
    assert [event.partition for event in again.asset_events] == keys[1:2]
    assert not again.dynamic_partitions_requests


def test_it_catches_up_in_bounded_ticks_without_losing_or_repeating(resource: Any, queue: Any, instance: Any) -> None:
    for start in range(0, 25_000, 5_000):
        enqueue(queue, f"type{start // 10_000}", *(str(number) for number in range(start, start + 5_000)))
    sensor = build_replication_sensor("landing", max_events_per_tick=4_000)
    ticks = catch_up(sensor, resource, instance)
    assert [int(found.cursor) for found in ticks] == [*range(4_000, 25_000, 4_000), 25_000, 25_000]
    said = [numbers(event) for found in ticks for event in found.asset_events]
    assert sum(one["events"] for one in said) == 25_000
    assert said[0]["lag"] == 21_000
    assert len(said) <= 2 * len(ticks)


def test_a_tick_makes_only_so_many_materializations(resource: Any, queue: Any, instance: Any) -> None:
    enqueue(queue, "file", *(str(number) for number in range(25)))
    sensor = build_replication_sensor("landing", granularity="resource", max_assets_per_tick=10)
    ticks = catch_up(sensor, resource, instance)
    assert [len(found.asset_events) for found in ticks] == [10, 10, 5, 0]
    assert len(instance.get_dynamic_partitions("landing_resources")) == 25


def test_a_tick_lasts_only_so_long(resource: Any, queue: Any, instance: Any) -> None:
    for start in range(0, 20_000, 10_000):
        enqueue(queue, "file", *(str(number) for number in range(start, start + 10_000)))
    sensor = build_replication_sensor("landing", max_seconds_per_tick=0.000_1)
    found = tick(sensor, resource, instance)
    assert int(found.cursor) <= 5_000


@pytest.mark.parametrize("registered", [True, False])
def test_a_lost_tick_is_repeated_the_same(resource: Any, queue: Any, instance: Any, registered: bool) -> None:
    """The daemon died before the cursor was saved: the same events, under the same data version."""
    enqueue(queue, "file", "a", "b")
    sensor = build_replication_sensor("landing", keep_log=registered)
    first = tick(sensor, resource, instance)
    second = tick(build_replication_sensor("landing", keep_log=registered), resource, instance)
    assert first.asset_events == second.asset_events


def test_the_log_waits_for_the_sensor(resource: Any, queue: Any, instance: Any) -> None:
    sensor = build_replication_sensor("landing")
    enqueue(queue, "file", "a")
    first = tick(sensor, resource, instance)
    enqueue(queue, "file", "b")
    second = tick(sensor, resource, instance, first.cursor)
    assert queue.prune_events(before=100) == 1, "what the second tick read may be asked for again"
    enqueue(queue, "file", "c")
    tick(sensor, resource, instance, second.cursor)
    assert queue.prune_events(before=100) == 2


def test_pruned_events_are_said_to_be_missing(resource: Any, queue: Any, instance: Any) -> None:
    sensor = build_replication_sensor("landing", keep_log=False)
    for name in "abcd":
        enqueue(queue, "file", name)
    assert queue.prune_events(before=4) == 3
    found = tick(sensor, resource, instance)
    [event] = found.asset_events
    assert numbers(event)["missed_events"] == 3
    assert numbers(event)["first_sequence_number"] == 4
    assert "3 of them pruned" in found.skip_message
    assert found.cursor == "4"
    late = build_replication_sensor("landing", name="late")
    assert numbers(tick(late, resource, instance).asset_events[0])["missed_events"] == 3


def test_it_can_start_at_the_end(resource: Any, queue: Any, instance: Any) -> None:
    enqueue(queue, "file", "a")
    sensor = build_replication_sensor("landing", start="end")
    found = tick(sensor, resource, instance)
    assert (found.asset_events, found.cursor) == ([], "1")


def test_a_queue_made_anew_is_read_from_its_beginning(resource: Any, queue: Any, instance: Any) -> None:
    enqueue(queue, "file", "a")
    found = tick(build_replication_sensor("landing"), resource, instance, cursor="1000")
    assert (len(found.asset_events), found.cursor) == (1, "1")


def test_a_cursor_that_is_no_number_is_refused(resource: Any, queue: Any, instance: Any) -> None:
    with pytest.raises(Exception, match="must be the number of the last event read"):
        tick(build_replication_sensor("landing"), resource, instance, cursor="{}")


def test_a_caught_up_tick_costs_the_same_however_long_the_log(
    tmp_path: Path, resource: Any, queue: Any, instance: Any
) -> None:
    sensor = build_replication_sensor("landing")

    def caught_up() -> None:
        tick(sensor, resource, instance, str(queue.stats().head))

    with counted(tmp_path / "fabric.db") as cost:
        enqueue(queue, "file", "first")
        short = cost(caught_up)
        for number in range(300):
            enqueue(queue, "file", str(number))
        assert 0 < cost(caught_up) < 1.2 * short


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"queue": "a-b"}, "queue: must be the key"),
        ({"queue": "landing", "granularity": "item"}, "granularity: must be one of 'namespace'"),
        ({"queue": "landing", "asset_key": "a"}, "give asset_key_prefix"),
        ({"queue": "landing", "granularity": "namespace", "asset_key": "a", "asset_key_prefix": "b"}, "not both"),
        ({"queue": "landing", "asset_key_prefix": []}, "asset_key_prefix: must be"),
        ({"queue": "landing", "event_types": ["Complete"]}, "event_types: must be a list of some of Enqueued"),
        ({"queue": "landing", "event_types": "Completed"}, "event_types"),
        ({"queue": "landing", "max_events_per_tick": 0}, "max_events_per_tick"),
        ({"queue": "landing", "max_assets_per_tick": 0}, "max_assets_per_tick"),
        ({"queue": "landing", "max_seconds_per_tick": 0}, "max_seconds_per_tick"),
        ({"queue": "landing", "start": "middle"}, "start: must be one of"),
        (
            {"queue": "landing", "partitions_def": dg.DynamicPartitionsDefinition(name="x")},
            "only means something with granularity='resource'",
        ),
        (
            {
                "queue": "landing",
                "granularity": "resource",
                "partitions_def": dg.StaticPartitionsDefinition(["a"]),
            },
            "must be a DynamicPartitionsDefinition with a name",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        build_replication_sensor(**arguments)
