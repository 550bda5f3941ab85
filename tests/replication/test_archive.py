"""Pruning what an archive holds, and reading across the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.recovery import rebuild
from lease_core.replication import (
    Batch,
    HistoryDiffers,
    JsonlSink,
    MemorySink,
    ObjectStoreSink,
    Relay,
    Rules,
    Sink,
    WithArchive,
    each_event,
    prune_archived,
    read_jsonl,
    read_segments,
    with_shard,
)
from lease_core.replication.sinks.object_store import SegmentsCopy
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


@pytest.fixture
def stranger(tmp_path: Path) -> Iterator[LeaseQueue]:
    """Another queue of the same name, with a log of its own."""
    with LeaseQueue.open(f"sqlite:///{tmp_path}/stranger.db") as opened:
        yield opened


def archive_of_another(queue: LeaseQueue, stranger: LeaseQueue, folder: Path, items: int) -> SegmentsCopy:
    """Both queues have as much in their logs; the archive is the stranger's."""
    for each in (queue, stranger):
        work(each, items)
    archive(stranger, folder / "archive")
    return read_segments(f"file://{folder}/archive")


def test_the_archive_of_another_queue_prunes_nothing(queue: LeaseQueue, stranger: LeaseQueue, tmp_path: Path) -> None:
    copy = archive_of_another(queue, stranger, tmp_path, 100)
    with pytest.raises(HistoryDiffers, match="another event 1 than the log"):
        prune_archived(queue, copy)
    assert queue.events(0, 1)[0].sequence_number == 1


def test_the_archive_of_another_queue_is_told_by_the_event_where_they_meet(
    queue: LeaseQueue, stranger: LeaseQueue, tmp_path: Path
) -> None:
    copy = archive_of_another(queue, stranger, tmp_path, 200)
    oldest = queue.prune_events(before=250) + 1
    whole = WithArchive(queue, copy)
    for _ in range(2):
        with pytest.raises(HistoryDiffers, match=f"another event {oldest} than"):
            whole.events(0)
    assert whole.events(oldest - 1, 1) == queue.events(oldest - 1, 1), "what the log has needs no archive"


def test_the_archive_of_another_queue_is_told_by_its_seals_where_they_do_not_overlap(
    queue: LeaseQueue, stranger: LeaseQueue, tmp_path: Path
) -> None:
    copy = archive_of_another(queue, stranger, tmp_path, 100)
    assert copy.queue_id == stranger.queue_id
    queue.prune_events(before=301)
    work(queue, 100)
    with pytest.raises(HistoryDiffers, match="begun for another queue"):
        WithArchive(queue, copy).events(0)


COPIES: dict[str, tuple[Callable[[Path], Sink], Callable[[Path], Any]]] = {
    "jsonl": (JsonlSink, read_jsonl),
    "tagged segments": (
        lambda path: with_shard(ObjectStoreSink(f"file://{path}"), "eu-1"),
        lambda path: read_segments(f"file://{path}"),
    ),
}


@pytest.mark.parametrize("kind", COPIES)
def test_a_queue_made_from_a_copy_goes_on_with_its_archive(kind: str, queue: LeaseQueue, tmp_path: Path) -> None:
    """It is the same queue, by the events that both have, or by what the copy says of itself."""
    work(queue, 100)
    sink, read = COPIES[kind]
    Relay(queue, sink(tmp_path / "copy"), rules=Rules(linger=0)).run_once()
    before = list(each_event(queue))
    copy = read(tmp_path / "copy")
    queue.drop_reader(next(iter(queue.readers())))
    assert prune_archived(queue, copy) == 300
    with rebuild(copy, f"sqlite:///{tmp_path}/rebuilt.db") as rebuilt:
        assert rebuilt.queue_id == queue.queue_id
        assert prune_archived(rebuilt, copy) == 300
        work(rebuilt, 10)
        found = list(each_event(WithArchive(rebuilt, copy)))
        assert len(found) == 330
        assert [event.sequence_number for event in found] == list(range(1, 331))
        assert [event.token for event in found[:300]] == [event.token for event in before]


def test_segments_from_before_they_said_whose_they_are_still_work(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 100)
    sink = ObjectStoreSink(f"file://{tmp_path}/archive")
    sink.deliver(Batch(queue.events(0, 300)))
    copy = read_segments(f"file://{tmp_path}/archive")
    assert copy.queue_id is None
    assert prune_archived(queue, copy) == 300
    work(queue, 10)
    assert len(list(each_event(WithArchive(queue, copy)))) == 330
