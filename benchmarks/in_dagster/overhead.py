"""A leased asset against a plain one: the same body, in the same process, on the same instance, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.contenders.contract import make_items
from benchmarks.in_dagster.findings import Overhead
from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster import LeaseQueueResource, leased_asset

QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def overhead(batch: int, rounds: int, scratch: Path) -> Overhead:
    resource = LeaseQueueResource(url=f"sqlite:///{scratch}/overhead-{batch}.db", namespace="bench", durability="full")
    items = work_items("overhead", batch)
    plain, leased = _assets(batch, items)
    found = Overhead(batch, [], [], [])
    with (
        dg.instance_for_test() as instance,
        LeaseQueue.open(resource.url, resource.namespace, resource.queue_config()) as queue,
    ):

        def run(asset: dg.AssetsDefinition) -> None:
            result = dg.materialize([asset], instance=instance, resources={"bench": resource}, run_config=QUIET)
            assert len(result.get_asset_materialization_events()) == 1

        for number in range(rounds + 1):
            ways = [(found.plain, lambda: run(plain)), (found.leased, lambda: run(leased))]
            for taken, way in ways if number % 2 else reversed(ways):
                if taken is found.leased:
                    queue.enqueue(items)
                taken.append(seconds(way))
            queue.enqueue(items)
            found.bare_queue.append(seconds(lambda: _bare(queue, batch)))
            if number == 0:  # warms caches, plans and connections
                for taken in (found.plain, found.leased, found.bare_queue):
                    taken.clear()
        assert queue.stats().completed == 2 * batch * (rounds + 1)
    return found


def _assets(batch_size: int, items: Sequence[WorkItem]) -> tuple[dg.AssetsDefinition, dg.AssetsDefinition]:
    @dg.asset
    def plain() -> int:
        return sum(len(item.body) for item in items)

    @leased_asset(queue="bench", batch_size=batch_size)
    def leased(batch: Any) -> int:
        return sum(len(item.body) for item in batch.items)

    return plain, leased


def _bare(queue: LeaseQueue, batch: int) -> None:
    """What leasing and completing cost without Dagster."""
    leases = queue.lease("bench", batch)
    assert len(leases) == batch
    queue.complete([lease.token for lease in leases], atomic=True).raise_if_refused()


def work_items(source: str, count: int) -> list[WorkItem]:
    return [WorkItem("file", item.resource_id, body=item.body) for item in make_items(source, count)]


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
