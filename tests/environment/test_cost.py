"""What must not cost more the longer the queue is, counted in steps of SQLite rather than in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem
from tests.sqlite_work import counted

QUICK = QueueConfig(durability="relaxed")
Cost = Callable[[Callable[[], object]], int]


@pytest.fixture
def cost(sqlite_path: Path) -> Iterator[Cost]:
    with counted(sqlite_path) as cost:
        yield cost


@pytest.fixture
def queue(sqlite_path: Path, cost: Cost) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(f"sqlite:///{sqlite_path}", config=QUICK) as opened:
        yield opened


def one_by_one(queue: LeaseQueue, items: int) -> None:
    """Items that have nothing in common, so that the queue cannot keep them together."""
    for number in range(items):
        queue.enqueue(WorkItem("file", str(number)))


def test_numbers(queue: LeaseQueue, cost: Cost) -> None:
    one_by_one(queue, 10)
    short = cost(queue.stats)
    one_by_one(queue, 200)
    for _ in range(100):
        queue.complete(queue.lease("worker")).raise_if_refused()
    assert 0 < cost(queue.stats) < 1.2 * short


def test_restoring_what_came_from_elsewhere(queue: LeaseQueue, cost: Cost) -> None:
    with LeaseQueue.open("sqlite://", config=QUICK) as other:
        other.enqueue([WorkItem("file", str(number)) for number in range(300)])
        foreign = other.drain()
    ours = count()
    queue.enqueue([WorkItem("own", str(number)) for number in range(300)])  # so that ids are taken
    few = [cost(lambda: queue.restore(foreign[next(ours)])) for _ in range(10)]
    queue.restore([foreign[next(ours)] for _ in range(270)])
    many = [cost(lambda: queue.restore(foreign[next(ours)])) for _ in range(10)]
    assert 0 < min(many) < 1.2 * min(few)
