"""Events that a sink refused for good, kept for people to look at."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import msgspec

from lease_core.model import LeaseEvent, Value
from lease_core.replication.durable_file import force_folder, make_folder, room_in


class RefusedEvent(Value, frozen=True):
    """An event that the relay went past, and why."""

    sink: str
    reason: str
    refused_at: datetime
    event: LeaseEvent


class RefusedEvents:
    """A file of refused events, a JSON object a line. Each is on disk before the relay goes past it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()

    def add(self, sink: str, reason: str, event: LeaseEvent) -> None:
        refused = RefusedEvent(sink, reason, datetime.now(UTC), event)
        with self._lock, room_in(self.path.parent):
            make_folder(self.path.parent)
            with self.path.open("ab+") as file:
                file.write((b"\n" if _is_torn(file) else b"") + refused.to_json() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            force_folder(self.path.parent)

    def __iter__(self) -> Iterator[RefusedEvent]:
        """Those refused so far; one that a crash cut off is left out, since it is refused again."""
        decoder = msgspec.json.Decoder(RefusedEvent)
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content.split(b"\n"):
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:
                continue


def _is_torn(file: BinaryIO) -> bool:
    """Whether a crash or a full disk cut the last line off: what comes next must not be joined to it."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
