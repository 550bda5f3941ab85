"""Sinks that force several batches to disk at once: what was not settled does not count."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lease_core import LeaseQueue
from lease_core.replication import (
    Backoff,
    Batch,
    CorruptCopy,
    JsonlSink,
    MemorySink,
    ObjectStoreSink,
    Relay,
    Rules,
    SinkUnavailable,
    durable_file,
    each_event,
    read_jsonl,
    read_segments,
)
from lease_core.replication.sinks import jsonl, object_store
from tests.replication.conftest import work

QUICK = Rules(batch_size=10, backoff=Backoff(0.001, 0.001))


class Settling:
    """Takes batches and keeps them when it is told to; a failure to do so loses all that it had taken."""

    name = "settling"
    sealed = True

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.taken: list[int] = []
        self.settled: list[int] = []
        self.failures = 0

    def position(self, namespace: str) -> int:
        return self.kept[-1] if self.kept else 0

    def deliver(self, batch: Batch) -> None:
        raise AssertionError("a sink that settles is not asked to do both at once")

    def take(self, batch: Batch) -> None:
        assert batch.first == (self.kept + self.taken + [0])[len(self.kept + self.taken) - 1] + 1
        self.taken += range(batch.first, batch.last + 1)

    def settle(self) -> None:
        taken, self.taken = self.taken, []
        if self.failures:
            self.failures -= 1
            raise SinkUnavailable("the disk is gone")
        self.settled.append(len(taken))
        self.kept += taken


def test_batches_that_are_at_hand_are_settled_together(queue: LeaseQueue) -> None:
    work(queue, 200)
    head = queue.stats().head
    sink = Settling()
    relay = Relay(queue, [sink, MemorySink()], rules={"settling": QUICK, "memory": Rules(batch_size=500)})
    relay._lanes[1].step()  # reads the whole page, of which the other sink then takes batch after batch
    for _ in range(head // 10):
        relay._lanes[0].step()
        status = relay.status()[0]
        assert status.position == len(sink.kept) == status.delivered  # never what is only taken
    relay.run_once()
    assert sink.kept == list(range(1, head + 1))
    assert max(sink.settled) == 80


def test_what_was_taken_when_settling_failed_comes_again(queue: LeaseQueue) -> None:
    work(queue, 100)
    head = queue.stats().head
    sink = Settling()
    sink.failures = 3
    relay = Relay(queue, sink, rules=QUICK)
    for _ in range(200):
        relay.run_once()
        [status] = relay.status()
        assert status.position == status.delivered == len(sink.kept)
        assert queue.readers()["relay/settling"] <= len(sink.kept)
    assert sink.kept == list(range(1, head + 1))


def test_what_was_taken_does_not_wait_for_what_lingers(queue: LeaseQueue) -> None:
    work(queue, 15)
    head = queue.stats().head
    sink = Settling()
    rules = {"settling": replace(QUICK, linger=60), "memory": Rules(batch_size=500)}
    relay = Relay(queue, [sink, MemorySink()], rules=rules)
    relay._lanes[1].step()  # reads the whole page, so that all of it is at hand
    for _ in range(head // 10 + 1):
        relay._lanes[0].step()
    assert head % 10
    assert relay.status()[0].position == len(sink.kept) == head // 10 * 10


def test_stopping_settles(queue: LeaseQueue) -> None:
    work(queue, 40)
    sink = Settling()
    relay = Relay(queue, sink, rules=QUICK)
    relay.run_once(max_batches=1)
    assert len(sink.kept) == 10
    assert sink.taken == []
    with relay:
        assert relay.wait_until(queue.stats().head, 10)
    assert queue.readers()["relay/settling"] == queue.stats().head == len(sink.kept)


def test_what_a_disk_did_not_take_is_cut_off_and_comes_again(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 30)
    sink = JsonlSink(tmp_path)
    batches = [Batch(queue.events(after, 10)) for after in (0, 10, 20)]
    sink.deliver(batches[0])
    sizes = [_size(tmp_path)]
    sink.take(batches[1])
    sink.take(batches[2])
    assert _size(tmp_path) > sizes[0]

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(jsonl, "_force", fails)
        with pytest.raises(OSError, match="the disk is gone"):
            sink.settle()
    assert _size(tmp_path) == sizes[0]
    assert sink.position(queue.namespace) == 10
    Relay(queue, sink).run_once()
    assert list(each_event(read_jsonl(tmp_path))) == list(each_event(queue))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.jsonl"))


def test_forcing_is_one_call_for_all_that_was_taken(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 30)
    forced: list[int] = []
    monkeypatch.setattr(jsonl, "_force", lambda descriptor: forced.append(os.fstat(descriptor).st_size))
    sink = JsonlSink(tmp_path)
    for after in (0, 10, 20):
        sink.take(Batch(queue.events(after, 10)))
    assert forced == []
    sink.settle()
    sink.settle()  # nothing new
    assert forced == [_size(tmp_path)]


def test_names_of_objects_are_forced_once_for_all_that_was_taken(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 30)
    folder = tmp_path / queue.namespace
    forced: list[list[str]] = []
    monkeypatch.setattr(
        object_store, "force_folder", lambda path: path == folder and forced.append(sorted(os.listdir(path)))
    )
    sink = ObjectStoreSink(tmp_path.as_uri())
    for after in (0, 10, 20):
        sink.take(Batch(queue.events(after, 10)))
    assert forced == []
    sink.settle()
    sink.settle()  # nothing new
    assert forced == [sorted(os.listdir(folder))]
    assert len(forced[0]) == 3
    sink.take(Batch(queue.events(30, 10)))
    assert ObjectStoreSink(tmp_path.as_uri()).position(queue.namespace) == 40  # which is another's, and not forced yet
    assert forced[1:] == [sorted(os.listdir(folder))]


def test_an_object_that_another_relay_has_put_is_forced_before_it_counts(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 30)
    ours, theirs = ObjectStoreSink(tmp_path.as_uri()), ObjectStoreSink(tmp_path.as_uri())
    assert ours.position(queue.namespace) == 0
    theirs.take(Batch(queue.events(0, 10)))
    forced: list[Path] = []
    monkeypatch.setattr(object_store, "force_folder", forced.append)
    ours.take(Batch(queue.events(0, 10)))
    ours.settle()
    assert forced[0] == tmp_path / queue.namespace


def test_objects_whose_names_the_disk_did_not_take_do_not_count(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 30)
    relay = Relay(queue, ObjectStoreSink(tmp_path.as_uri()), rules=replace(QUICK, linger=0))
    relay.run_once(max_batches=1)

    def fails(folder: Path) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(object_store, "force_folder", fails)
        for _ in range(3):
            [status] = relay.run_once()
            assert (status.state, status.position) == ("retrying", 10)
            assert queue.readers()["relay/objects"] == 10
            time.sleep(0.002)
    relay.run_once()
    assert relay.status()[0].position == queue.readers()["relay/objects"] == queue.stats().head
    assert list(each_event(read_segments(tmp_path.as_uri()))) == list(each_event(queue))


def test_what_was_taken_before_a_failure_is_counted_once_it_is_seen_to_be_there(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 40)
    head = queue.stats().head
    sink, puts, looks = ObjectStoreSink(tmp_path.as_uri()), 0, 0
    put_new, keys = object_store.put_new, object_store.keys

    def fails_after_the_first(*given: Any) -> list[str]:
        nonlocal looks
        looks += 1
        if looks == 2:  # when the sink is asked what it has, after the failure
            raise OSError(errno.EIO, "for another moment")
        return keys(*given)

    def fails_once(*given: Any) -> None:
        nonlocal puts
        puts += 1
        if puts == 6:
            raise OSError(errno.EIO, "for a moment")
        put_new(*given)

    monkeypatch.setattr(object_store, "put_new", fails_once)
    monkeypatch.setattr(object_store, "keys", fails_after_the_first)
    relay = Relay(queue, [sink, MemorySink()], rules={"objects": replace(QUICK, linger=0), "memory": Rules()})
    relay._lanes[1].step()  # so that all of it is at hand, and nothing is settled before the failure
    for _ in range(5):
        relay.run_once()
        time.sleep(0.002)
    assert looks > 2
    assert relay.status()[0].delivered == relay.status()[0].position == head


def test_where_what_was_put_is_there_for_good_nothing_is_settled(queue: LeaseQueue) -> None:
    work(queue, 20)
    sink = ObjectStoreSink("memory:///")
    relay = Relay(queue, [sink, MemorySink()], rules={"objects": replace(QUICK, linger=0), "memory": Rules()})
    relay._lanes[1].step()
    relay._lanes[0].step()
    assert not sink.settles
    assert relay.status()[0].position == 10


def test_a_hole_that_unforced_names_left_is_found(queue: LeaseQueue, tmp_path: Path) -> None:
    """Some file systems lose names in another order than that in which they were given."""
    work(queue, 30)
    sink = ObjectStoreSink(tmp_path.as_uri())
    for after in range(0, 50, 10):
        sink.take(Batch(queue.events(after, 10)))
    sorted((tmp_path / queue.namespace).iterdir())[2].unlink()
    with pytest.raises(CorruptCopy, match="events 21 to 30 are missing"):
        ObjectStoreSink(tmp_path.as_uri()).position(queue.namespace)


def test_a_folder_that_is_gone_holds_up_no_other(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 10)
    batch = Batch(queue.events(0, 10))
    sink = ObjectStoreSink(tmp_path.as_uri())
    other = Batch([msgspec.structs.replace(event, namespace="other") for event in batch])
    sink.take(batch)
    shutil.rmtree(tmp_path / queue.namespace)
    with pytest.raises(FileNotFoundError):
        sink.settle()
    sink.deliver(other)
    sink.deliver(batch)
    assert sink.position("other") == sink.position(queue.namespace) == 10


@pytest.mark.parametrize("sink", [JsonlSink, lambda path: ObjectStoreSink(path.as_uri())])
def test_the_name_of_a_folder_is_forced_whoever_made_it(
    sink: Any, queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been made by a relay that was killed before it forced the name."""
    work(queue, 3)
    place = tmp_path / "copy"
    (place / queue.namespace).mkdir(parents=True)
    forced: list[Path] = []
    for module in (jsonl, object_store):
        monkeypatch.setattr(module, "force_folder", forced.append)
    sink(place).deliver(Batch(queue.events()))
    assert place in forced


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_file_is_placed_whole_or_not_at_all(unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not unnamed:
        monkeypatch.setattr(durable_file, "_place_unnamed", lambda path, content: False)
    path = tmp_path / "folder" / "ä file"
    durable_file.place_file(path, b"x" * 300_000)
    with pytest.raises(FileExistsError):
        durable_file.place_file(path, b"y")
    assert path.read_bytes() == b"x" * 300_000
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    present = os.umask(0)
    os.umask(present)
    return present


def test_a_disk_that_is_full_leaves_nothing_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(descriptor: int, data: Any) -> int:
        if len(data) < 200_000:
            raise OSError(errno.ENOSPC, "no space left")
        return real(descriptor, data[:100_000])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="no space left"):
        durable_file.place_file(tmp_path / "file", b"x" * 300_000)
    assert list(tmp_path.iterdir()) == []
