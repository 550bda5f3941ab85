"""A snapshot and the events after it are as good as all events."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned, InvalidInput
from lease_core.recovery import Snapshot, rebuild, snapshot
from lease_core.replication import CorruptCopy, each_event
from tests.conformance.clock import FakeClock
from tests.recovery.histories import config, live, rows


def test_it_needs_only_what_came_after(original: LeaseQueue, url: str, tmp_path: Path, clock: FakeClock) -> None:
    made = snapshot(original, tmp_path / "snapshot")
    assert made.sequence_number == original.stats().head
    live(original, clock, seed=8, steps=40)
    original.prune_events(before=made.sequence_number + 1)
    with rebuild(original, url, snapshot=tmp_path / "snapshot", config=config(), clock=clock) as copy:
        before, after = rows(original), rows(copy)
        assert before["items"].items() <= after["items"].items()
        assert before["origins"] <= after["origins"]
        assert copy.stats() == original.stats()
        start = made.sequence_number
        assert list(each_event(copy, start)) == list(each_event(original, start))
        assert [lease.item for lease in copy.lease("next", limit=50)] == [
            lease.item for lease in original.lease("next", limit=50)
        ]


def test_from_postgresql(postgres_url: str, sqlite_url: str, tmp_path: Path, clock: FakeClock) -> None:
    with LeaseQueue.open(postgres_url, "main", config(), auto_migrate=True, clock=clock) as original:
        live(original, clock, seed=5)
        snapshot(original, tmp_path / "snapshot")
        with rebuild(original, sqlite_url, snapshot=tmp_path / "snapshot", config=config(), clock=clock) as copy:
            assert rows(copy) == rows(original)
            assert copy.stats() == original.stats()


def test_without_it_a_pruned_log_is_not_enough(original: LeaseQueue, sqlite_url: str) -> None:
    original.prune_events(before=100)
    with pytest.raises(EventsPruned):
        rebuild(original, sqlite_url, config=config())


def test_any_changed_byte_is_noticed(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "snapshot"
    with LeaseQueue.open("sqlite://", "main", config(), clock=clock) as queue:
        live(queue, clock, seed=1, steps=8)
        snapshot(queue, path)
        whole = path.read_bytes()
        for at in [*range(0, 700, 13), *range(700, len(whole), 211), len(whole) - 1]:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CorruptCopy):
                rebuild(queue, "sqlite://", namespace="main", snapshot=path, clock=clock)
        for length in range(0, len(whole) - 1, 499):
            path.write_bytes(whole[:length])
            with pytest.raises(CorruptCopy):
                rebuild(queue, "sqlite://", namespace="main", snapshot=path, clock=clock)
        path.write_bytes(whole)
        rebuild(queue, "sqlite://", snapshot=path, clock=clock).close()


def test_one_of_another_queue_is_not_used(original: LeaseQueue, sqlite_url: str, tmp_path: Path) -> None:
    with LeaseQueue.open("sqlite://", "another") as another:
        snapshot(another, tmp_path / "snapshot")
    with pytest.raises(InvalidInput, match="snapshot: is of 'another', but the source has the log of 'main'"):
        rebuild(original, sqlite_url, snapshot=tmp_path / "snapshot", config=config())


def test_two_at_once_do_not_write_into_each_other(original: LeaseQueue, sqlite_url: str, tmp_path: Path) -> None:
    """Both are whole, and the later one stays; one that fails leaves nothing."""
    path = tmp_path / "snapshot"
    with ThreadPoolExecutor(4) as pool:
        made = [each.result() for each in [pool.submit(_snapshot_apart, tmp_path, path) for _ in range(12)]]
    assert {each.sequence_number for each in made} == {original.stats().head}
    for bad in (tmp_path / "nowhere" / "snapshot", tmp_path):
        with pytest.raises(InvalidInput, match="in a folder that exists"):
            snapshot(original, bad)
    with pytest.raises(InvalidInput, match="snapshot: there is no file"):
        rebuild(original, sqlite_url, snapshot=tmp_path / "nothing")
    assert [each.name for each in tmp_path.glob("*snapshot*")] == ["snapshot"]
    rebuild(original, sqlite_url, snapshot=path, config=config()).close()


def _snapshot_apart(folder: Path, path: Path) -> Snapshot:
    with LeaseQueue.open(f"sqlite:///{folder}/original.db", "main") as queue:
        return snapshot(queue, path)
