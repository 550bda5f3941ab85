"""Pruning what an archive holds, and reading across the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseEvent, LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import EventsPruned, InvalidInput
from lease_core.recovery import Standby, rebuild, verify
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
from lease_core.replication.contract import Checkpoints
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


@pytest.fixture
def whole(queue: LeaseQueue, tmp_path: Path) -> WithArchive:
    """A log of 600 events, of which the first 300 are in the archive only."""
    work(queue, 100)
    archive(queue, tmp_path / "archive")
    copy = read_segments(f"file://{tmp_path}/archive")
    assert prune_archived(queue, copy) == 300
    queue.drop_reader(next(iter(queue.readers())))
    work(queue, 100)
    return WithArchive(queue, copy)


class Forgetful:
    """A sink that does not know what it has got, and may be killed with a batch in its hands."""

    name = "late"

    def __init__(self) -> None:
        self.got: list[LeaseEvent] = []
        self.kill_at = 10**6

    def deliver(self, batch: Batch) -> None:
        self.got.extend(batch)
        if batch.last >= self.kill_at:
            raise Killed


class Killed(BaseException):
    pass


SMALL = Rules(batch_size=30, checkpoint_every=0)


@pytest.mark.parametrize("size", [30, 1_000])
@pytest.mark.parametrize("start", ["beginning", "oldest"])
@pytest.mark.parametrize("sink", [MemorySink, Forgetful])
def test_a_relay_begins_in_the_archive_and_goes_on_with_the_log(
    sink: Callable[[], Any], start: Any, size: int, whole: WithArchive, queue: LeaseQueue
) -> None:
    late = sink()
    [status] = Relay(whole, late, rules=Rules(batch_size=size, start=start)).run_once()
    assert (status.state, status.position, status.delivered) == ("running", 600, 600)
    assert (late.kept if sink is MemorySink else late.got) == list(each_event(whole))
    assert queue.readers() == {f"relay/{late.name}": 600}


def test_a_relay_killed_in_the_archive_goes_on_from_its_checkpoint(whole: WithArchive, queue: LeaseQueue) -> None:
    """Nothing is missing, and of what a sink without a position sees again there is one batch each time."""
    late = Forgetful()
    for number in (1, 100, 200, 290, 301, 450):
        late.kill_at = number
        with pytest.raises(Killed):
            Relay(WithArchive(queue, whole._copy), late, rules=SMALL).run_once()
        assert len(queue.readers()) == 1, "one place is kept"
    late.kill_at = 10**6
    Relay(WithArchive(queue, whole._copy), late, rules=SMALL).run_once()
    numbers = [event.sequence_number for event in late.got]
    assert sorted(set(numbers)) == list(range(1, 601))
    assert len(numbers) == 600 + 6 * 30
    assert queue.readers() == {"relay/late": 600}


def test_a_sink_with_a_position_gets_nothing_twice_from_the_archive(whole: WithArchive, queue: LeaseQueue) -> None:
    late = MemorySink("late")
    delivered = 0
    for batches in (1, 3, 2, 5, 20):
        [status] = Relay(WithArchive(queue, whole._copy), late, rules=SMALL).run_once(batches)
        delivered += status.delivered
    assert late.kept == list(each_event(whole))
    assert delivered == 600


def test_while_a_reader_is_in_the_archive_the_log_is_kept_for_it(whole: WithArchive, queue: LeaseQueue) -> None:
    assert whole.register_reader("slow") == 0
    assert queue.readers() == {"slow, at 0 of the archive": 300}
    assert whole.readers() == {"slow": 0}
    assert queue.prune_events(before=601) == 300
    with pytest.raises(EventsPruned):  # the log alone does not have what it needs, and must not pass over it
        queue.register_reader("slow", 0)
    for to, place in ((120, 120), (60, 120), (299, 299), (300, 300), (400, 400), (350, 400)):
        whole.advance_reader("slow", to)
        assert (whole.readers(), whole.register_reader("slow", 7)) == ({"slow": place}, place)
        assert len(queue.readers()) == 1
    assert queue.readers() == {"slow": 400}
    assert 300 < queue.prune_events(before=601) <= 400


def test_a_reader_is_dropped_wherever_it_is(whole: WithArchive, queue: LeaseQueue) -> None:
    for to in (0, 100, 500):
        whole.register_reader("slow")
        whole.advance_reader("slow", to)
        whole.drop_reader("slow")
        assert queue.readers() == {}
        with pytest.raises(InvalidInput, match="no reader 'slow'"):
            whole.advance_reader("slow", 550)


def test_whoever_is_killed_between_two_places_is_at_the_further_one(whole: WithArchive, queue: LeaseQueue) -> None:
    queue.register_reader("slow, at 100 of the archive", 300)
    queue.register_reader("slow, at 150 of the archive", 300)
    assert whole.register_reader("slow") == 150
    whole.advance_reader("slow", 160)
    assert queue.readers() == {"slow, at 160 of the archive": 300}
    queue.register_reader("slow", 310)
    assert whole.register_reader("slow") == 310
    assert queue.readers() == {"slow": 310}


def test_a_reader_of_what_neither_has_is_refused(whole: WithArchive, queue: LeaseQueue, tmp_path: Path) -> None:
    sorted((tmp_path / "archive").rglob("*.jsonl"))[0].unlink()
    with pytest.raises(EventsPruned) as gap:
        whole.register_reader("slow")
    assert gap.value.oldest == 101
    assert queue.readers() == {}
    [status] = Relay(whole, MemorySink("late")).run_once()
    assert status.state == "stopped"
    oldest = MemorySink("oldest")
    Relay(whole, oldest, rules=Rules(start="oldest")).run_once()
    assert [event.sequence_number for event in oldest.kept] == list(range(101, 601))


def test_places_are_kept_where_the_log_keeps_them(whole: WithArchive) -> None:
    assert isinstance(whole, Checkpoints)
    assert not isinstance(WithArchive(MemorySink(), MemorySink()), Checkpoints)


def test_a_standby_begins_in_the_archive_and_takes_over(whole: WithArchive, queue: LeaseQueue, tmp_path: Path) -> None:
    place, before = f"sqlite:///{tmp_path}/standby.db", list(each_event(whole))
    for _ in range(3):  # each goes on with what the one before has made
        with Standby(whole, place) as standby:
            assert standby.follow(limit=110) > 0
            assert len(queue.readers()) == 1
            assert set(whole.readers().values()) == {standby.number}
    with Standby(whole, place) as standby:
        while standby.follow(limit=110):
            pass
        assert standby.lag() == 0
        assert queue.readers() == {f"standby/{standby.name}": 600}
        with standby.promote(queue) as promoted:
            assert list(each_event(promoted)) == before
            assert verify(promoted, whole, tables=promoted).ok


def test_what_is_made_of_log_and_archive_has_the_rules_of_the_queue(tmp_path: Path) -> None:
    rules = QueueConfig(exclusive="resource", capacity=50, high_watermark=40, low_watermark=5)
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db", config=rules) as queue:
        queue.enqueue([WorkItem("file", "same") for _ in range(3)])
        archive(queue, tmp_path / "archive")
        copy = read_segments(f"file://{tmp_path}/archive")
        prune_archived(queue, copy)
        with rebuild(WithArchive(queue, copy), f"sqlite:///{tmp_path}/rebuilt.db") as rebuilt:
            assert rebuilt.queue_id == queue.queue_id
            assert len(rebuilt.lease("worker", limit=3)) == 1


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
        assert found[:300] == before


def test_segments_from_before_they_said_whose_they_are_still_work(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 100)
    sink = ObjectStoreSink(f"file://{tmp_path}/archive")
    sink.deliver(Batch(queue.events(0, 300)))
    copy = read_segments(f"file://{tmp_path}/archive")
    assert copy.queue_id is None
    assert prune_archived(queue, copy) == 300
    work(queue, 10)
    assert len(list(each_event(WithArchive(queue, copy)))) == 330
