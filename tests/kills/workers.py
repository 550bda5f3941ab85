"""Producers and consumers that keep a journal and may be killed at any moment, or at a point of their choice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lease_core import BackpressureActive, Lease, LeaseQueue, LeaseToken, QueueConfig, WorkItem
from lease_core.errors import StoreBusy, StoreUnavailable
from tests.kills.journal import Journal

POINTS = ("locked", "half-written", "before-commit", "after-commit")
CONFIG = QueueConfig(lease_duration=0.5, max_attempts=1_000, retry_delay=0, high_watermark=600, low_watermark=400)
AT_THE_MOST = 120.0  # seconds a worker lives if nobody ends it


class Death(NamedTuple):
    """Where a worker kills itself: at a named point of an operation, the ``visit``-th time it gets there."""

    point: str
    visit: int = 1


def open_queue(url: str, namespace: str, config: QueueConfig = CONFIG, death: Death | None = None) -> LeaseQueue:
    queue = LeaseQueue.open(url, namespace, config)
    if death is not None:
        queue._store.probe = _killer(death)
    return queue


def _killer(death: Death) -> Callable[[str], None]:
    visits = 0

    def probe(point: str) -> None:
        nonlocal visits
        visits += point == death.point
        if visits == death.visit:
            os.kill(os.getpid(), signal.SIGKILL)

    return probe


def flat(token: LeaseToken) -> list[Any]:
    """A token as the journal keeps it."""
    return list(msgspec.structs.astuple(token))


class Worker:
    """What producers and consumers have in common: a queue, a journal, and dice."""

    def __init__(self, url: str, namespace: str, directory: Path, name: str, death: Death | None) -> None:
        self.name = name
        self.dice = random.Random(name)
        self.journal = Journal(directory / f"{name}.journal")
        self.queue = open_queue(url, namespace, death=death)
        self._stop = directory / "stop"

    def turns(self) -> Iterator[int]:
        end = time.monotonic() + AT_THE_MOST
        turn = 0
        while time.monotonic() < end and not self._stop.exists():
            yield (turn := turn + 1)

    def call(self, operation: str, given: list[Any], act: Callable[[], list[Any]]) -> list[Any] | None:
        """The answer, or None if there was none because of the weather."""
        try:
            return self.journal.around(operation, given, act)
        except (BackpressureActive, StoreUnavailable, StoreBusy):
            return None


def produce(url: str, namespace: str, directory: Path, name: str, death: Death | None = None) -> None:
    """Enqueue batches; an answer is the list of ids."""
    worker = Worker(url, namespace, directory, name, death)
    for turn in worker.turns():
        size = worker.dice.randint(1, 20)
        batch = [WorkItem("file", f"{name}/{turn}/{n}", request_id=f"{name}/{turn}/{n}") for n in range(size)]
        requests = [item.request_id for item in batch]
        worker.call(
            "enqueue", requests, lambda batch=batch: [r.sequence_id for r in worker.queue.enqueue(batch, wait=1)]
        )


def consume(url: str, namespace: str, directory: Path, name: str, death: Death | None = None) -> None:
    """Lease batches and do something with each; answers are lists of tokens."""
    worker = Worker(url, namespace, directory, name, death)
    queue, dice = worker.queue, worker.dice
    for _ in worker.turns():
        leases: list[Lease] = []

        def lease(into: list[Lease] = leases) -> list[Any]:
            into.extend(queue.lease(name, limit=dice.randint(1, 30), wait=0.5))
            return [flat(each.token) for each in into]

        worker.call("lease", [], lease)
        tokens = [each.token for each in leases]
        if not tokens:
            continue
        if dice.random() < 0.3:
            acknowledge(worker, "heartbeat", tokens, queue.heartbeat)
        match dice.choices(("complete", "some", "fail", "release", "forget"), (6, 2, 1, 1, 1))[0]:
            case "complete":
                acknowledge(worker, "complete", tokens, lambda given: queue.complete(given, atomic=True))
            case "some":
                acknowledge(worker, "complete", tokens[::2], lambda given: queue.complete(given, atomic=True))
            case "fail":
                acknowledge(worker, "fail", tokens, lambda given: queue.fail(given, "no luck", delay=0))
            case "release":
                acknowledge(worker, "release", tokens, queue.release)


def acknowledge(worker: Worker, operation: str, tokens: list[LeaseToken], act: Callable[..., Any]) -> None:
    worker.call(operation, [flat(t) for t in tokens], lambda: [flat(t) for t in act(tokens).accepted])
