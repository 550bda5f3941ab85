"""What tests of leased Spark work share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import dagster as dg

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource


def enqueue(landing: LeaseQueueResource, *names: str) -> None:
    landing.get_queue().enqueue([WorkItem("file", name) for name in names])


def take(queue: LeaseQueue, limit: int = 100, say: Callable[[str], None] = lambda text: None) -> LeasedBatch:
    return LeasedBatch(queue, queue.lease("worker", limit), say)


def output(asset: str = "bronze", partition: str | None = None, **metadata: Any) -> dg.OutputContext:
    partitions = None if partition is None else dg.StaticPartitionsDefinition([partition])
    key_range = None if partition is None else dg.PartitionKeyRange(partition, partition)
    return dg.build_output_context(
        asset_key=asset,
        run_id="run",
        asset_partitions_def=partitions,
        asset_partition_key_range=key_range,
        definition_metadata={f"omnirelay/{name}": value for name, value in metadata.items()},
    )


def publish(fenced: FencedIOManager, value: Any, asset: str = "bronze", **more: Any) -> Any:
    """One item comes in, is leased, and its output published."""
    enqueue(fenced.queue, "x")
    return fenced.publish(output(asset, **more), take(fenced.queue.get_queue()), value)


def until(true: Callable[[], Any], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.05)
