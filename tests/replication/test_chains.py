"""A copy relayed on, to the next one: what it says goes on as it is written, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue
from lease_core.replication import (
    Backoff,
    Batch,
    HistoryDiffers,
    JsonlSink,
    ObjectStoreSink,
    Relay,
    Rules,
    encode_events,
    read_jsonl,
    read_segments,
)
from tests.replication.conftest import work

QUICK = Rules(batch_size=7, linger=0, backoff=Backoff(0.001, 0.001))
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "lines": (JsonlSink, read_jsonl),
    "objects": (lambda path: ObjectStoreSink(path.as_uri()), lambda path: read_segments(path.as_uri())),
}


def _said(folder: Path) -> bytes:
    """All events of a copy as they are written, without the seals."""
    files = sorted(folder.rglob("*.jsonl"))
    lines = (line for file in files for line in file.read_bytes().splitlines(keepends=True))
    return b"".join(line for line in lines if not line.startswith(b'{"seal":'))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_newer_writer_said_goes_on_to_the_next_copy(queue: LeaseQueue, tmp_path: Path, kind: str) -> None:
    open_sink, read = KINDS[kind]
    work(queue, 10)
    newer = encode_events(queue.events()).replace(
        b'"schemaVersion":1}', b'"schemaVersion":2,"mood":{"a":["\xc3\xa4"]}}'
    )
    assert newer.count(b'"mood"') == 30
    first = open_sink(tmp_path / "first")
    first.deliver(Batch.of_payload(queue.namespace, 1, newer, 30))
    getattr(first, "close", lambda: None)()
    for _ in range(2):  # and again by a relay that goes on
        relay = Relay(read(tmp_path / "first"), open_sink(tmp_path / "next"), rules=QUICK)
        relay.run_once(max_batches=3)
        relay.stop()
    assert _said(tmp_path / "next") == newer


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_damaged_copy_all_that_is_good_goes_on_and_then_it_stops(
    queue: LeaseQueue, tmp_path: Path, kind: str
) -> None:
    open_sink, read = KINDS[kind]
    work(queue, 10)
    first = open_sink(tmp_path / "first")
    for after in range(0, 30, 10):
        first.deliver(Batch(queue.events(after, 10)))
    getattr(first, "close", lambda: None)()
    file = sorted((tmp_path / "first").rglob("*.jsonl"))[-1]
    file.write_bytes(file.read_bytes().replace(b'"sequenceNumber":25', b'"sequenceNumber":26'))
    relay = Relay(read(tmp_path / "first"), open_sink(tmp_path / "next"), rules=QUICK)
    for _ in range(3):
        [status] = relay.run_once()
    relay.stop()
    assert status.position == 20
    assert _said(tmp_path / "next") == encode_events(queue.events(0, 20))


def test_a_copy_that_begins_late_is_not_taken_for_one_that_does_not(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 10)
    sink = ObjectStoreSink(tmp_path.as_uri())
    sink.deliver(Batch(queue.events(10, 20)))
    with pytest.raises(HistoryDiffers, match="events are missing in the source after 0"):
        read_segments(tmp_path.as_uri()).event_payload(0, 10)
