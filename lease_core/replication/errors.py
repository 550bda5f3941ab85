"""What can go wrong between the log and its copies.

LeaseError
├── UnreadableEvent     bytes that are not an event of any version             (also a ValueError)
├── RefusedForGood      a sink will never take this event: repeating is no use
├── SinkUnavailable     a sink cannot take anything now: repeating is
├── CorruptCopy         a copy is not what was written: it is never read past that point
└── HistoryDiffers      a copy holds another history than the log it is to follow
"""

from __future__ import annotations

from lease_core.errors import LeaseError


class UnreadableEvent(LeaseError, ValueError):
    """The bytes are not an event. ``line`` is which of several, from 1."""

    code = "resourcelease.unreadable_event"

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem if line is None else f"line {line}: {problem}")
        self.problem = problem
        self.line = line

    def __reduce__(self) -> tuple[type, tuple[str, int | None]]:
        return type(self), (self.problem, self.line)


class RefusedForGood(LeaseError):
    """A sink will never take this. ``sequence_number`` is the event's, where the sink knows which of a batch it is."""

    code = "resourcelease.refused_for_good"

    def __init__(self, reason: str, sequence_number: int | None = None) -> None:
        super().__init__(reason if sequence_number is None else f"event {sequence_number}: {reason}")
        self.reason = reason
        self.sequence_number = sequence_number

    def __reduce__(self) -> tuple[type, tuple[str, int | None]]:
        return type(self), (self.reason, self.sequence_number)


class SinkUnavailable(LeaseError):
    """A sink cannot take anything now. ``retry_after`` is how many seconds it asks to be left alone, if it said."""

    code = "resourcelease.sink_unavailable"

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type, tuple[str, float | None]]:
        return type(self), (self.reason, self.retry_after)


class CorruptCopy(LeaseError):
    """A copy is damaged at ``place``. All events up to ``last_good`` were read and checked; nothing after is used."""

    code = "resourcelease.corrupt_copy"

    def __init__(self, place: str, problem: str, last_good: int) -> None:
        super().__init__(f"{place}: {problem}; the first bad event is {last_good + 1}, all before it are good")
        self.place = place
        self.problem = problem
        self.last_good = last_good

    @property
    def first_bad(self) -> int:
        return self.last_good + 1

    def __reduce__(self) -> tuple[type, tuple[str, str, int]]:
        return type(self), (self.place, self.problem, self.last_good)


class HistoryDiffers(LeaseError):
    """A copy and the log tell different stories, so one must not be appended to the other."""

    code = "resourcelease.history_differs"
