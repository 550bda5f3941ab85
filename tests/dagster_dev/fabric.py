"""The code locations under a running `dagster dev`, together with the queues they work on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from lease_core import LeaseEvent, LeaseQueue
from omnirelay_dagster import FencedIOManager
from tests.dagster_dev import instance_view as view
from tests.dagster_dev.dev_server import DagsterDev
from tests.dagster_dev.staged_work import Actor, actors
from tests.dagster_dev.surroundings import Surroundings

MODULES = (view.LOCATION, view.SECOND_LOCATION)


class Fabric:
    """A running instance, and the same queues and outputs that its runs use."""

    def __init__(
        self, home: Path, url: str, storage: Mapping[str, Any] | None = None, modules: Sequence[str] = MODULES
    ) -> None:
        self.home = home
        self._surroundings = Surroundings(home, url)
        self._outputs: dict[str, FencedIOManager] = {}
        self.dev = DagsterDev(home, modules, self._surroundings.as_environment(), storage)

    def __enter__(self) -> Fabric:
        self.dev.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.dev.stop()
        for outputs in self._outputs.values():
            outputs.queue.get_queue().close()

    @contextmanager
    def sensing(self, *sensors: str, location: str = view.LOCATION) -> Iterator[None]:
        """Sensors that are on for as long as somebody needs them."""
        for sensor in sensors:
            view.start_sensor(self.dev, sensor, location)
        try:
            yield
        finally:
            for sensor in sensors:
                view.stop_sensor(self.dev, sensor, location)

    def outputs(self, queue: str) -> FencedIOManager:
        """What reads the outputs that were published under a queue's leases."""
        if queue not in self._outputs:
            self._outputs[queue] = self._surroundings.outputs(queue)
        return self._outputs[queue]

    def queue(self, name: str) -> LeaseQueue:
        return self.outputs(name).queue.get_queue()

    def actor(self, asset: str, after: int = 0) -> Actor:
        """Who works for an asset, under a lease younger than the number ``after`` of the log, once somebody does."""
        self.dev.until(lambda: any(actor.fence > after for actor in actors(self.home, asset)))
        return next(actor for actor in actors(self.home, asset) if actor.fence > after)

    def actors(self, asset: str, number: int) -> list[Actor]:
        """All who work for an asset, once there are so many."""
        self.dev.until(lambda: len(actors(self.home, asset)) >= number)
        return actors(self.home, asset)

    def working(self, asset: str) -> list[Actor]:
        """All who have begun to work for an asset, and whose step and run worker both live."""
        latest = {actor.step: actor for actor in actors(self.home, asset)}
        return [actor for actor in latest.values() if _parent(actor.step) == actor.worker]

    def drained(self, queue: str) -> bool:
        stats = self.queue(queue).stats()
        return stats.pending == 0 and stats.active == 0


def _parent(pid: int) -> int | None:
    """Who started a process that is alive; an orphan's parent is another one than it was."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.ppid()
    except psutil.NoSuchProcess:
        return None


def log_of(queue: LeaseQueue, after: int = 0) -> list[LeaseEvent]:
    """All events of a queue after a number of its log."""
    events: list[LeaseEvent] = []
    while some := queue.events(after=events[-1].sequence_number if events else after, limit=10_000):
        events += some
    return events


def counts(events: list[LeaseEvent]) -> Counter[str]:
    return Counter(str(event.type) for event in events)
