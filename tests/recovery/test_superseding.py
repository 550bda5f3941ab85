"""A primary that was taken for lost comes back: it is sealed in favour of the queue that works in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import InvalidInput, QueueSealed
from lease_core.recovery import Standby, supersede
from lease_core.replication import HistoryDiffers


def _queue(folder: Path, name: str = "old", namespace: str = "main") -> LeaseQueue:
    queue = LeaseQueue.open(f"sqlite:///{folder}/{name}.db", namespace)
    queue.enqueue([WorkItem("file", name) for name in "abc"])
    return queue


def _taken_over(old: LeaseQueue, url: str) -> LeaseQueue:
    """The queue that took over from ``old`` when that could not be reached."""
    with Standby(old, url) as standby:
        standby.follow()
    return Standby(None, url, namespace="main").promote(primary_is_lost=True)


def test_it_takes_no_more_writes_and_the_other_goes_on(url: str, tmp_path: Path) -> None:
    with _queue(tmp_path) as old, _taken_over(old, url) as new:
        assert len(old.lease("worker", limit=1)) == len(new.lease("worker", limit=1)) == 1  # which is what must end
        head = old.stats().head
        for _ in range(2):
            assert supersede(old, new).number == head
        with pytest.raises(QueueSealed):
            old.lease("worker")
        assert len(new.lease("worker", limit=5)) == 2
        assert new.readers() == {}


def test_a_queue_is_never_sealed_in_favour_of_itself(url: str) -> None:
    LeaseQueue.migrate(url)
    with LeaseQueue.open(url, "main") as queue, LeaseQueue.open(url, "main") as again:
        with pytest.raises(InvalidInput, match="the very queue that is to go on"):
            supersede(queue, again)
        queue.enqueue(WorkItem("file", "a"))


def test_nor_is_the_one_that_took_over(url: str, tmp_path: Path) -> None:
    with _queue(tmp_path) as old, _taken_over(old, url) as new:
        with pytest.raises(InvalidInput, match="wrong way round"):
            supersede(new, old)
        new.enqueue(WorkItem("file", "d"))


def test_nor_another_queue_of_the_same_name(sqlite_url: str, tmp_path: Path) -> None:
    with _queue(tmp_path) as old, _queue(tmp_path, "stranger") as stranger, _taken_over(old, sqlite_url) as new:
        with pytest.raises(HistoryDiffers, match="another past"):
            supersede(stranger, new)
        stranger.enqueue(WorkItem("file", "d"))


def test_nor_one_of_another_name(tmp_path: Path) -> None:
    with _queue(tmp_path) as old, _queue(tmp_path, "other", "else") as other, pytest.raises(InvalidInput, match="else"):
        supersede(old, other)
