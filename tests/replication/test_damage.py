"""Copies that are torn or damaged: found, named, and never used silently."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lease_core import LeaseEvent, LeaseQueue
from lease_core.replication import (
    Batch,
    CorruptCopy,
    JsonlSink,
    ObjectStoreSink,
    Relay,
    SinkUnavailable,
    SqlSink,
    read_jsonl,
    read_segments,
    read_sql,
)
from lease_core.replication.sealed import Seal
from tests.replication.conftest import work


@pytest.fixture
def events(queue: LeaseQueue) -> list[LeaseEvent]:
    work(queue, 4)
    return queue.events()


def one_file(folder: Path) -> Path:
    [file] = folder.rglob("*.jsonl")
    return file


def write(folder: Path, events: list[LeaseEvent], size: int = 4) -> None:
    sink = JsonlSink(folder)
    for start in range(0, len(events), size):
        sink.deliver(Batch(events[start : start + size]))
    sink.close()


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for offset in range(len(data)):
        yield offset, data[:offset] + bytes([data[offset] ^ (1 << offset % 8)]) + data[offset + 1 :]


def test_a_bit_flipped_at_any_byte_of_a_segment_is_found(tmp_path: Path, events: list[LeaseEvent]) -> None:
    ObjectStoreSink(f"file://{tmp_path}").deliver(Batch(events[3:6]))
    file = one_file(tmp_path)
    copy = read_segments(f"file://{tmp_path}")
    assert list(copy.read()) == events[3:6]
    for offset, damaged in flips(file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(CorruptCopy) as found:
            list(copy.read())
        assert found.value.first_bad == 4, offset


@pytest.mark.parametrize("digest", [lambda payload: payload, lambda payload: hashlib.sha256(payload).digest()])
def test_a_copy_whose_seals_are_of_an_earlier_kind_is_read(
    digest: Callable[[bytes], bytes], tmp_path: Path, events: list[LeaseEvent]
) -> None:
    """The first ones have their digest over the payload itself, those after them over its SHA-256."""
    before, data = None, b""
    for batch in (Batch(events[:5]), Batch(events[5:9])):
        bare = Seal(batch.namespace, batch.first, batch.last, len(batch), before.sha256 if before else "")
        before = replace(bare, sha256=hashlib.sha256(bare.to_json() + digest(batch.payload)).hexdigest())
        data += batch.payload + before.line()
    folder = tmp_path / events[0].namespace
    folder.mkdir()
    (folder / f"{1:020d}.jsonl").write_bytes(data)
    assert list(read_jsonl(tmp_path).read(strict=True)) == events[:9]
    sink = JsonlSink(tmp_path)
    sink.deliver(Batch(events[9:12]))
    sink.close()
    assert list(read_jsonl(tmp_path).read(strict=True)) == events[:12]
    file = one_file(tmp_path)
    for _, damaged in flips(file.read_bytes()):
        file.write_bytes(damaged)
        with pytest.raises(CorruptCopy):
            list(read_jsonl(tmp_path).read(strict=True))


def test_a_segment_cut_at_any_byte_is_found(tmp_path: Path, events: list[LeaseEvent]) -> None:
    ObjectStoreSink(f"file://{tmp_path}").deliver(Batch(events[:3]))
    file = one_file(tmp_path)
    whole = file.read_bytes()
    for end in range(1, len(whole)):
        file.write_bytes(whole[:end])
        with pytest.raises(CorruptCopy):
            list(read_segments(f"file://{tmp_path}").read())


def test_a_bit_flipped_anywhere_in_a_file_is_found_after_all_that_is_good(
    tmp_path: Path, events: list[LeaseEvent]
) -> None:
    write(tmp_path, events)
    file = one_file(tmp_path)
    copy = read_jsonl(tmp_path)
    whole = file.read_bytes()
    ends = [end for end in range(len(whole)) if whole[:end].endswith(b"\n") and whole[:end].count(b'\n{"seal"')]
    assert list(copy.read(strict=True)) == events
    for offset, damaged in flips(whole):
        if offset % 3:  # every third byte, three batches: the segment's test does them all
            continue
        file.write_bytes(damaged)
        good: list[LeaseEvent] = []
        with pytest.raises(CorruptCopy) as found:
            good.extend(_collect(copy.read(strict=True), good))
        assert good == events[: found.value.last_good]
        assert found.value.last_good in (0, 4, 8)
    assert ends


def _collect(events: Iterator[LeaseEvent], into: list[LeaseEvent]) -> list[LeaseEvent]:
    for event in events:
        into.append(event)
    return []


@pytest.fixture(scope="module")
def torn_samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[LeaseEvent], bytes, str]:
    folder = tmp_path_factory.mktemp("torn")
    with LeaseQueue.open("sqlite://") as queue:
        work(queue, 4)
        events = queue.events()
    write(folder, events)
    return events, one_file(folder).read_bytes(), one_file(folder).name


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_torn_end_is_cut_off_and_comes_again(
    torn_samples: tuple[list[LeaseEvent], bytes, str], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    events, whole, name = torn_samples
    folder = tmp_path_factory.mktemp("one")
    file = folder / "resourcelease" / name
    file.parent.mkdir()
    end = data.draw(st.integers(0, len(whole)))
    rubbish = data.draw(st.sampled_from([b"", b"\0" * 100, b'{"namespace":', b"\xff\xfe\n\n"]))
    file.write_bytes(whole[:end] + rubbish)
    sink = JsonlSink(folder)
    position = sink.position("resourcelease") or 0
    assert position in (0, 4, 8, 12)
    assert whole[:end].count(b'{"seal"') >= position // 4
    sink.deliver(Batch(events))
    sink.close()
    assert list(read_jsonl(folder).read(strict=True)) == events


def test_damage_in_the_middle_is_not_mistaken_for_a_torn_end(tmp_path: Path, queue: LeaseQueue) -> None:
    work(queue, 20)
    write(tmp_path / "copy", queue.events(), size=10)
    file = one_file(tmp_path / "copy")
    damaged = bytearray(file.read_bytes())
    damaged[damaged.index(b'"sequenceNumber":25,') + 20] ^= 1
    file.write_bytes(damaged)
    relay = Relay(queue, JsonlSink(tmp_path / "copy"))
    [status] = relay.run_once()
    relay.stop()
    assert status.state == "stopped"
    assert "first bad event is 21" in (status.error or "")
    assert file.read_bytes() == damaged  # nothing is repaired by throwing good events away


def test_what_was_cut_off_is_set_aside(tmp_path: Path, events: list[LeaseEvent]) -> None:
    write(tmp_path, events)
    file = one_file(tmp_path)
    with file.open("ab") as end:
        end.write(b"half of a li")
    JsonlSink(tmp_path).position("resourcelease")
    assert file.with_suffix(".torn").read_bytes() == b"half of a li"


def test_a_reader_beside_the_writer_sees_sealed_batches_only(tmp_path: Path, events: list[LeaseEvent]) -> None:
    write(tmp_path, events[:8])
    with one_file(tmp_path).open("ab") as end:
        end.write(b'{"namespace":"resourcelease","sequ')
    copy = read_jsonl(tmp_path)
    assert copy.events(0, 100) == events[:8]
    write(tmp_path, events)
    assert copy.events(8, 100) == events[8:]


def test_a_lost_file_is_a_gap(tmp_path: Path, queue: LeaseQueue) -> None:
    work(queue, 30)
    sink = JsonlSink(tmp_path / "copy", max_bytes=1)
    for start in range(0, 90, 30):
        sink.deliver(Batch(queue.events(start, 30)))
    sink.close()
    first, second, _ = sorted((tmp_path / "copy").rglob("*.jsonl"))
    second.unlink()
    with pytest.raises(CorruptCopy, match="events 31 to 60 are missing"):
        list(read_jsonl(tmp_path / "copy").read())
    first.unlink()
    assert [event.sequence_number for event in read_jsonl(tmp_path / "copy").read(60)] == list(range(61, 91))


def test_two_writers_do_not_write_into_each_other(tmp_path: Path, events: list[LeaseEvent]) -> None:
    one = JsonlSink(tmp_path)
    one.deliver(Batch(events[:5]))
    with pytest.raises(SinkUnavailable, match="another relay"):
        JsonlSink(tmp_path).deliver(Batch(events[5:]))
    one.close()
    JsonlSink(tmp_path).deliver(Batch(events[5:]))
    assert list(read_jsonl(tmp_path).read(strict=True)) == events


@pytest.mark.parametrize(
    ("statement", "first_bad"),
    [
        ("update {t} set event = replace(event, 'worker-1', 'worker-2') where sequence_number = 6", 6),
        ("update {t} set crc32 = crc32 + 1 where sequence_number = 3", 3),
        ("update {t} set event = 'rubbish' where sequence_number = 3", 3),
        ("delete from {t} where sequence_number = 7", 7),
        ("delete from {t} where sequence_number > 9", 10),
    ],
)
def test_a_row_that_changed_or_went_is_found(
    tmp_path: Path, events: list[LeaseEvent], statement: str, first_bad: int
) -> None:
    url = f"sqlite:///{tmp_path}/copy.db"
    SqlSink(url).deliver(Batch(events))
    connection = sqlite3.connect(tmp_path / "copy.db")
    with connection:
        connection.execute(statement.format(t="omnirelay_copied_event"))
    connection.close()
    with pytest.raises(CorruptCopy) as found:
        list(read_sql(url, "resourcelease").read())
    assert found.value.first_bad == first_bad


def test_rows_that_come_while_a_copy_is_read_are_not_missing_from_it(tmp_path: Path, events: list[LeaseEvent]) -> None:
    """A batch is committed after the reader saw no more rows, and before it asks how far the copy reaches."""
    url = f"sqlite:///{tmp_path}/copy.db"
    sink, copy = SqlSink(url), read_sql(url, "resourcelease")
    sink.deliver(Batch(events[:4]))
    ask = copy.last

    def ask_late() -> int | None:
        sink.deliver(Batch(events[:8]))
        return ask()

    copy.last = ask_late  # type: ignore[method-assign]
    assert list(copy.read()) == events[:8]
