"""A copy whose writer is interrupted at any step: it and others go on with it, and every event is there once."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lease_core.replication
from lease_core import LeaseQueue
from lease_core.replication import (
    Batch,
    EventSource,
    JsonlSink,
    ObjectStoreSink,
    SinkUnavailable,
    SqlSink,
    each_event,
    read_jsonl,
    read_segments,
    read_sql,
)
from lease_core.replication.sinks import jsonl
from tests.interrupts import at_every_step
from tests.replication.conftest import work

CODE = [Path(lease_core.replication.__file__).parent]
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], EventSource]]] = {
    "lines": (lambda path: JsonlSink(path, max_bytes=1_000), read_jsonl),
    "objects": (lambda path: ObjectStoreSink(path.as_uri()), lambda path: read_segments(path.as_uri())),
    "rows": (
        lambda path: SqlSink(f"sqlite:///{path}.db"),
        lambda path: read_sql(f"sqlite:///{path}.db", "resourcelease"),
    ),
}


def close(sink: Any) -> None:
    getattr(sink, "close", lambda: None)()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fresh", [True, False], ids=["opened for it", "open already"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_step_leaves_a_copy_to_go_on_with(
    queue: LeaseQueue, tmp_path: Path, kind: str, fresh: bool
) -> None:
    open_sink, read = KINDS[kind]
    work(queue, 4)
    first, second = Batch(queue.events(0, 5)), Batch(queue.events(5, 5))

    def begun(number: int) -> tuple[Path, Any]:
        """A copy that holds the first batch, and a sink for the second one."""
        path = tmp_path / f"copy-{number}"
        sink = open_sink(path)
        sink.deliver(first)
        if fresh:
            close(sink)
            sink = open_sink(path)
        return path, sink

    copies = [begun(0)]
    for place in at_every_step(CODE, lambda: copies[-1][1].deliver(second)):
        path, sink = copies[-1]
        try:
            assert sink.position(queue.namespace) in (5, 10), place
            sink.deliver(second)
            close(sink)
            sink = open_sink(path)  # as another process would
            assert sink.position(queue.namespace) == 10, place
        except SinkUnavailable as error:
            pytest.fail(f"after an interrupt at {place}: {error}")
        close(sink)
        assert list(each_event(read(path))) == queue.events(0, 10), place
        copies.append(begun(len(copies)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("act", ["close", "a delivery that the disk does not take"])
def test_an_interrupt_at_any_step_leaves_no_lock(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    work(queue, 4)
    first, second = Batch(queue.events(0, 5)), Batch(queue.events(5, 5))
    sinks = [JsonlSink(tmp_path)]
    sinks[-1].deliver(first)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    def interrupted() -> None:
        if act == "close":
            return sinks[-1].close()
        with monkeypatch.context() as patched, suppress(SinkUnavailable):
            patched.setattr(jsonl, "_write", full)
            sinks[-1].deliver(second)
        return None

    for place in at_every_step(CODE, interrupted, least=5):
        sinks[-1].close()
        sinks.append(JsonlSink(tmp_path))
        try:
            assert sinks[-1].position(queue.namespace) == 5, place
        except SinkUnavailable as error:
            pytest.fail(f"after an interrupt at {place}: {error}")
