"""A run of events on its way to a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property

from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent
from lease_core.replication.codec import decode_event, decode_events, encode_events
from lease_core.replication.digest import digest_of


class Batch:
    """Events of one namespace in the order of the log, with their bytes, which are made once and shared.

    ``first`` and ``last`` are sequence numbers. ``lines`` has each event as JSON without a line break; ``payload`` is
    all of them as one text of lines. A batch is made in one of these forms; the others come when asked for.
    """

    origin = ""
    """The id of the queue whose log this is, where the source says it."""

    meanwhile: Callable[[], None] | None = None
    """Reads what comes after this batch. For a sink to call while it has nothing to do but wait for an answer.

    It raises nothing, and takes as long as the source does.
    """

    def __init__(self, events: Sequence[LeaseEvent]) -> None:
        if not events:
            raise InvalidInput("events", "a batch needs at least one")
        self.__dict__["events"] = events
        self.namespace = events[0].namespace
        self.first = events[0].sequence_number
        self.last = events[-1].sequence_number
        self._count = len(events)

    @classmethod
    def of_lines(cls, namespace: str, first: int, lines: Sequence[str]) -> Batch:
        """A batch of encoded events, numbered from ``first`` without a gap."""
        if not lines:
            raise InvalidInput("lines", "a batch needs at least one")
        return cls._made("lines", lines, namespace, first, len(lines))

    @classmethod
    def of_payload(cls, namespace: str, first: int, payload: bytes, count: int) -> Batch:
        """The same of one text that has ``count`` lines."""
        if count < 1:
            raise InvalidInput("count", f"a batch needs at least one event (got {count})")
        return cls._made("payload", payload, namespace, first, count)

    @classmethod
    def _made(cls, form: str, value: object, namespace: str, first: int, count: int) -> Batch:
        batch = cls.__new__(cls)
        batch.__dict__[form] = value
        batch.namespace, batch.first, batch.last, batch._count = namespace, first, first + count - 1, count
        return batch

    @cached_property
    def events(self) -> Sequence[LeaseEvent]:
        return decode_events(self.payload)

    @cached_property
    def lines(self) -> Sequence[str]:
        return self.payload.decode().split("\n")[:-1]

    @cached_property
    def payload(self) -> bytes:
        lines: Sequence[str] | None = self.__dict__.get("lines")
        return encode_events(self.events) if lines is None else ("\n".join(lines) + "\n").encode()

    @cached_property
    def digest(self) -> bytes:
        """By which its payload is known."""
        return digest_of(self.payload)

    @cached_property
    def oldest(self) -> datetime:
        """When its first event was committed."""
        events: Sequence[LeaseEvent] | None = self.__dict__.get("events")
        if events is not None:
            return events[0].timestamp
        return decode_event(self.payload[: self.payload.index(b"\n")]).timestamp

    @property
    def numbers(self) -> Sequence[int]:
        """The sequence number of each event."""
        if self.last - self.first + 1 == len(self):
            return range(self.first, self.last + 1)
        return [event.sequence_number for event in self.events]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[LeaseEvent]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"Batch({self.namespace!r}, {self.first} to {self.last})"

    def after(self, number: int) -> Batch | None:
        """What is left of it above ``number``; nothing, if that is all of it."""
        if number < self.first:
            return self
        if number >= self.last:
            return None
        numbers = self.numbers
        if isinstance(numbers, range):
            return self._cut(number - self.first + 1, len(self))
        return self._cut(next(index for index, each in enumerate(numbers) if each > number), len(self))

    def head(self, size: int) -> Batch:
        """Its first ``size`` events."""
        return self if size >= len(self) else self._cut(0, size)

    def halves(self) -> tuple[Batch, Batch]:
        middle = len(self) // 2
        return self._cut(0, middle), self._cut(middle, len(self))

    def _cut(self, start: int, end: int) -> Batch:
        numbers = self.numbers
        part = Batch.__new__(Batch)
        part.origin = self.origin
        part.namespace, part.first, part.last = self.namespace, numbers[start], numbers[end - 1]
        part._count = end - start
        if "events" in self.__dict__:
            part.__dict__["events"] = self.events[start:end]
        if "events" not in self.__dict__ or "lines" in self.__dict__:
            part.__dict__["lines"] = self.lines[start:end]
        return part
