"""Short words for what the tests of the fenced IO manager say: come in, be leased, be published."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import dagster as dg

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource


def enqueue(landing: LeaseQueueResource, *names: str) -> None:
    landing.get_queue().enqueue([WorkItem("file", name) for name in names])


def take(queue: LeaseQueue, limit: int = 100) -> LeasedBatch:
    return LeasedBatch(queue, queue.lease("worker", limit), lambda text: None)


def output(asset: str = "bronze", partition: str | None = None) -> dg.OutputContext:
    partitions = None if partition is None else dg.StaticPartitionsDefinition([partition])
    key_range = None if partition is None else dg.PartitionKeyRange(partition, partition)
    return dg.build_output_context(
        asset_key=asset, run_id="run", asset_partitions_def=partitions, asset_partition_key_range=key_range
    )


def publish(fenced: FencedIOManager, value: Any, asset: str = "bronze", partition: str | None = None) -> Any:
    """One item comes in, is leased, and its output published."""
    enqueue(fenced.queue, "x")
    return fenced.publish(output(asset, partition), take(fenced.queue.get_queue()), value)


def run(assets: Sequence[Any], fenced: FencedIOManager, **arguments: Any) -> dg.ExecuteInProcessResult:
    resources = {"landing": fenced.queue, "fenced": fenced, "io_manager": dg.mem_io_manager}
    arguments.setdefault("instance", dg.DagsterInstance.ephemeral())
    return dg.materialize(assets, resources=resources, **arguments)


def message(result: dg.ExecuteInProcessResult) -> str:
    """All that Dagster says about why a step failed."""
    assert not result.success
    [failure] = result.get_step_failure_events()
    error = failure.step_failure_data.error
    return f"{error}\n{error.cause}" if error else ""


def taken_over(landing: LeaseQueueResource) -> LeaseQueue:
    """The queue as it is an hour from now, when whatever is leased now has long expired."""
    return LeaseQueue.open(landing.url, "landing", clock=lambda: time.time() + 3600)


def orphan(fenced: FencedIOManager, value: Any = "orphan") -> LeasedBatch:
    """Written under a lease, and never published; the lease is still held."""
    enqueue(fenced.queue, "x")
    batch = take(fenced.queue.get_queue())
    fenced._write(output(), batch, value)
    return batch
