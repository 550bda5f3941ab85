"""Pruning what an archive holds, and reading across the two."""

from __future__ import annotations

from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.replication import (
    MemorySink,
    ObjectStoreSink,
    Relay,
    Rules,
    WithArchive,
    each_event,
    prune_archived,
    read_segments,
)
from tests.replication.conftest import work


def archive(queue: LeaseQueue, folder: Path) -> None:
    Relay(queue, ObjectStoreSink(f"file://{folder}"), rules=Rules(batch_size=100, linger=0)).run_once()


def test_a_reader_crosses_from_the_archive_to_the_live_log(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 500)
    archive(queue, tmp_path / "archive")
    before = list(each_event(queue))
    copy = read_segments(f"file://{tmp_path}/archive")
    gone = prune_archived(queue, copy)
    assert gone == len(before)
    work(queue, 100)
    with pytest.raises(EventsPruned):
        queue.events(0)
    whole = WithArchive(queue, copy)
    found = list(each_event(whole, page=70))
    assert found[: len(before)] == before
    assert found[len(before) :] == queue.events(gone, 1_000)
    assert [event.sequence_number for event in found] == list(range(1, 1_801))
    late = MemorySink("late")
    relay = Relay(whole, late, rules=Rules(start="oldest"), checkpoints=None)
    relay.run_once()
    assert late.kept[-1].sequence_number == 1_800


def test_only_what_is_archived_and_sound_is_pruned(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 500)
    archive(queue, tmp_path / "archive")
    work(queue, 100)
    damaged = sorted((tmp_path / "archive").rglob("*.jsonl"))[5]
    damaged.write_bytes(damaged.read_bytes().replace(b"worker-1", b"worker-2", 1))
    gone = prune_archived(queue, read_segments(f"file://{tmp_path}/archive"))
    assert 400 <= gone <= 500
    assert queue.events(gone, 1)[0].sequence_number == gone + 1


def test_a_slow_reader_keeps_the_log(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 200)
    queue.register_reader("slow", 0)
    archive(queue, tmp_path / "archive")
    assert prune_archived(queue, read_segments(f"file://{tmp_path}/archive")) == 0


def test_what_neither_has_is_missed_aloud(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 200)
    archive(queue, tmp_path / "archive")
    copy = read_segments(f"file://{tmp_path}/archive")
    prune_archived(queue, copy)
    sorted((tmp_path / "archive").rglob("*.jsonl"))[0].unlink()
    with pytest.raises(EventsPruned):
        WithArchive(queue, copy).events(0)
