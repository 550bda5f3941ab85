"""Whether a copy of the log is whole, says what another says, and explains the tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent, Value
from lease_core.queue import LeaseQueue
from lease_core.recovery.progress import Progress, on_terminal
from lease_core.recovery.strict import strictly
from lease_core.recovery.tables import Expected, difference
from lease_core.replay import ReplayDiverged, Replica
from lease_core.replication.contract import EventSource, each_event
from lease_core.replication.errors import CorruptCopy
from lease_core.replication.same_event import same_event, untagged

_TOGETHER = 1_000


class Report(Value, frozen=True):
    """What ``verify`` found. ``last_good`` is the number up to which everything is as it should be.

    If there is a ``problem``, ``first_bad`` is the number it was found at, and the copy must not be used past
    ``last_good``: ``rebuild(copy, url, upto=report.last_good)`` makes a queue of what is good. ``behind`` is how many
    events the other one has after the copy's last.
    """

    last_good: int
    problem: str | None = None
    behind: int = 0

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def first_bad(self) -> int | None:
        return None if self.ok else self.last_good + 1

    def __str__(self) -> str:
        if self.ok and self.behind:
            last = self.last_good + self.behind
            return f"good up to event {self.last_good}; the other has events up to {last}, {self.behind} more"
        if self.ok:
            return f"good up to event {self.last_good}, which is the last"
        return f"event {self.first_bad}: {self.problem} (good up to {self.last_good})"


def verify(
    copy: EventSource,
    against: EventSource | None = None,
    *,
    tables: LeaseQueue | None = None,
    after: int = 0,
    lag_allowed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Read a copy from end to end and say where it stops being good.

    Checksums are checked by the copy's own reader. The numbers must be dense and every event one that could have
    happened to the items as the events before it left them. ``against`` is another copy, or the queue itself, that must
    hold the very same events, tagged with a shard or not, and no more: a copy whose end was cut off looks like one that
    is not up to date. For one that is still being written say by how many events it may be behind, ``lag_allowed``.
    ``tables`` is a queue whose rows must be what the events up to its head make of them. ``after`` begins in the
    middle, where the log was pruned: numbers and checksums are checked, but what an event does to items cannot be, and
    so neither can ``tables``.
    """
    if lag_allowed < 0:
        raise InvalidInput("lag_allowed", f"must be 0 or more (got {lag_allowed})")
    if after and tables is not None:
        raise InvalidInput("tables", "can be compared with a log from its first event only, not with after=")
    copy = strictly(copy)
    progress = progress or on_terminal("verifying")
    good = after
    expected = None if tables is None else Expected()
    replica = expected or (Replica() if after == 0 else None)
    head = tables.stats().head if tables is not None else None
    others = each_event(against, after, _TOGETHER) if against is not None else iter(())
    if tables and expected and good == head and (wrong := _compared(tables, expected)):
        return wrong
    try:
        for event in each_event(copy, after, _TOGETHER):
            problem = _problem(event, good, replica, others if against is not None else None)
            if problem:
                return Report(good, problem)
            good = event.sequence_number
            if progress is not None and good % _TOGETHER == 0:
                progress(good, head)
            if tables and expected and good == head and (wrong := _compared(tables, expected)):
                return wrong
        behind = 0 if against is None else _left(against, others, good)
    except CorruptCopy as damage:
        return Report(good, f"{damage.place}: {damage.problem}")
    if behind > lag_allowed:
        return Report(good, f"the copy ends at {good}, and the other has events up to {good + behind}", behind)
    if head is not None and good < head:
        return Report(good, f"the copy ends here, but the queue has events up to {head}", behind)
    return Report(good, behind=behind)


def _left(source: EventSource, rest: Iterator[LeaseEvent], good: int) -> int:
    """How many events ``source`` has after ``good``: it is asked where it ends if it can tell, else read to there."""
    following = next(rest, None)
    if following is None:
        return 0
    stats = getattr(source, "stats", None)
    if stats is not None:
        return int(stats().head) - good
    [last] = deque(chain([following], rest), maxlen=1)
    return last.sequence_number - good


def _problem(event: LeaseEvent, good: int, replica: Replica | None, others: Iterator[LeaseEvent] | None) -> str | None:
    if event.sequence_number != good + 1:
        return f"number {event.sequence_number} follows {good}: events are missing, doubled or out of order"
    if others is not None:
        other = next(others, None)
        if other is None:
            return "the other copy has no such event"
        if not same_event(event, other):
            return f"the two differ: {_difference(untagged(event), untagged(other))}"
    if replica is not None:
        try:
            replica.apply(event)
        except ReplayDiverged as error:
            return error.problem
    return None


def _difference(one: LeaseEvent, other: LeaseEvent) -> str:
    fields = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return ", ".join(fields)


def _compared(queue: LeaseQueue, expected: Expected) -> Report | None:
    """What is wrong with the queue's rows, if anything is."""
    problem = difference(queue, expected)
    if problem is None:
        return None
    if queue.stats().head != expected.number:
        return Report(expected.number, "the queue went on while it was compared; seal it, stop its users, or repeat")
    return Report(max(expected.number - 1, 0), problem)
