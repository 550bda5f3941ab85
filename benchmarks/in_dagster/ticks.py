"""How long a tick of a sensor takes when it is up to date, by the length of the log behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.in_dagster.findings import Tick, percentile
from benchmarks.in_dagster.overhead import seconds, work_items
from lease_core import LeaseQueue
from omnirelay_dagster import LeaseQueueResource, build_replication_sensor, build_work_sensor, leased_asset

CALL = 1_000
PENDING = 100  # so that the work sensor finds something to launch
BLOCK = 10


@leased_asset(queue="bench")
def bronze(batch: Any) -> None:
    """What the work sensor would launch."""


def ticks(lengths: Sequence[int], calls: int, scratch: Path, say: Callable[[str], None]) -> list[Tick]:
    """Tick each sensor on each log, in turns, so that a busy neighbour disturbs all of them."""
    sites = [_Site(length, _filled(length, scratch, say)) for length in lengths]
    taken: dict[tuple[str, int], list[float]] = {}
    with dg.instance_for_test() as instance, ExitStack() as stack:
        ways: dict[tuple[str, int], Callable[[], None]] = {}
        for kind in ("replication", "work"):
            for site in sites:
                ways[kind, site.length] = partial(site.tick, kind, instance)
            for site in sites:
                opened = stack.enter_context(site.context(kind, instance))
                ways[f"{kind}, queue open already", site.length] = partial(site.evaluate, kind, opened)
        for turn in range(1 + calls // BLOCK):
            for cell, once in ways.items():
                times = [seconds(once) for _ in range(BLOCK)]
                # the first turn registers the reader, opens what stays open, and warms caches and plans
                taken[cell] = [] if turn == 0 else taken[cell] + times
    return [
        Tick(way, length, percentile(times, 0.5) * 1e3, percentile(times, 0.99) * 1e3, len(times))
        for (way, length), times in taken.items()
    ]


class _Site:
    """A code location whose sensors are up to date with a log of some length."""

    def __init__(self, length: int, resource: LeaseQueueResource) -> None:
        self.length = length
        self._resource = resource
        self._sensors = {
            "replication": build_replication_sensor("bench"),
            "work": build_work_sensor("bench", target=bronze),
        }
        self._repository = dg.Definitions(
            assets=[bronze], sensors=list(self._sensors.values()), resources={"bench": resource}
        ).get_repository_def()

    def context(self, kind: str, instance: dg.DagsterInstance) -> dg.SensorEvaluationContext:
        return dg.build_sensor_context(
            instance=instance,
            cursor=str(self.length) if kind == "replication" else None,
            resources={"bench": self._resource},
            repository_def=self._repository,
            sensor_name=self._sensors[kind].name,
        )

    def tick(self, kind: str, instance: dg.DagsterInstance) -> None:
        """A whole tick: the queue is opened, looked at and closed."""
        with self.context(kind, instance) as context:
            self.evaluate(kind, context)

    def evaluate(self, kind: str, context: dg.SensorEvaluationContext) -> None:
        """The sensor's own part, so that the cost of opening cannot hide that it grows."""
        result = self._sensors[kind].evaluate_tick(context)
        # a tick that was not up to date, or found nothing to launch, did not do what is being timed
        if kind == "replication":
            assert (result.cursor, list(result.asset_events)) == (str(self.length), [])
        else:
            assert len(result.run_requests or []) == 1


def _filled(events: int, scratch: Path, say: Callable[[str], None]) -> LeaseQueueResource:
    """A queue whose log has so many events: items that were enqueued, leased and completed, and a few that wait."""
    resource = LeaseQueueResource(url=f"sqlite:///{scratch}/log-{events}.db", namespace="bench", durability="full")
    with LeaseQueue.open(resource.url, resource.namespace, resource.queue_config()) as queue:
        items = work_items("log", CALL)
        while (left := events - PENDING - queue.stats().head) > 0:
            count = min(CALL, -(-left // 3))
            queue.enqueue(items[:count])
            queue.complete([lease.token for lease in queue.lease("bench", count)]).raise_if_refused()
        queue.enqueue(items[: events - queue.stats().head])
        assert queue.stats().head == events
    say(f"a log of {events:,} events is ready")
    return resource
