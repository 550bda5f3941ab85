"""Reading a copy by pages without reading it anew for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent
from lease_core.replication.errors import CorruptCopy, HistoryDiffers


class Line(NamedTuple):
    """An event as a copy has it, with its line break."""

    sequence_number: int
    text: bytes


Numbered = TypeVar("Numbered", LeaseEvent, Line)


class Paged(Generic[Numbered]):
    """Turns ``read(after)``, which goes through a copy from there on, into ``events(after, limit)``.

    Who pages forward continues the same pass; anybody else begins a new one. At the end of the copy the pass is given
    up, so that what is added later is found.
    """

    def __init__(self, read: Callable[[int], Iterator[Numbered]]) -> None:
        self._read: Callable[[int], Iterator[Numbered]] = read
        self._pass: Iterator[Numbered] | None = None
        self._at = -1
        self._lock = threading.Lock()

    def events(self, after: int, limit: int) -> list[Numbered]:
        if after < 0:
            raise InvalidInput("after", f"must be 0 or more (got {after})")
        if limit < 1:
            raise InvalidInput("limit", f"must be 1 or more (got {limit})")
        with self._lock:
            if self._pass is None or self._at != after:
                self._pass = self._read(after)
            pass_, self._pass = self._pass, None  # an error below ends the pass
            found = list(islice(pass_, limit))
            if len(found) == limit:
                self._pass, self._at = pass_, found[-1].sequence_number
            return found


class PagedLines:
    """The same for the lines of a copy, as ``event_payload(after, limit)``: what a newer writer said is not lost."""

    def __init__(self, read: Callable[[int], Iterator[Line]]) -> None:
        self._paged = Paged(read)

    def event_payload(self, after: int, limit: int) -> tuple[bytes, int]:
        """The events above ``after``, one a line, and how many they are. Of a damaged copy, all that is good first."""
        try:
            found = self._paged.events(after, limit)
        except CorruptCopy as damage:
            if damage.last_good <= after:
                raise
            found = self._paged.events(after, min(limit, damage.last_good - after))
        if found and found[0].sequence_number != after + 1:
            raise HistoryDiffers(f"events are missing in the source after {after}: verify it before copying it")
        return b"".join(line.text for line in found), len(found)
