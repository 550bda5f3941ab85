"""Whether a copy of the log is whole, says what another says, and explains the tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from lease_core.errors import EventsPruned, InvalidInput
from lease_core.model import LeaseEvent, Value
from lease_core.queue import LeaseQueue
from lease_core.recovery.progress import Progress, on_terminal
from lease_core.recovery.strict import strictly
from lease_core.recovery.tables import Expected, difference
from lease_core.replay import ReplayDiverged, Replica
from lease_core.replication.contract import EventSource, each_event, good_events
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
    snapshot: str | Path | None = None,
    lag_allowed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Read a copy from end to end and say where it stops being good.

    Checksums are checked by the copy's own reader. The numbers must be dense and every event one that could have
    happened to the items as the events before it left them. ``against`` is another copy, or the queue itself, that must
    hold the very same events, tagged with a shard or not, and no more: a copy whose end was cut off looks like one that
    is not up to date. For one that is still being written say by how many events it may be behind, ``lag_allowed``.
    ``tables`` is a queue whose rows must be what the events up to its head make of them.

    Where the log was pruned, begin after it: with ``snapshot``, the items as they stood at some event that is still
    there or was the last to go, all is checked from there on. With ``after`` alone numbers and checksums are, but what
    an event does to items cannot be, and so neither can ``tables``.
    """
    if lag_allowed < 0:
        raise InvalidInput("lag_allowed", f"must be 0 or more (got {lag_allowed})")
    if after and tables is not None:
        raise InvalidInput("tables", "cannot be compared with after=: give snapshot=, or a copy that has the whole log")
    if after and snapshot is not None:
        raise InvalidInput("after", "is what the snapshot says; give one of the two")
    bar = on_terminal("verifying", copy) if progress is None else None
    try:
        return _read_through(strictly(copy), against, tables, after, snapshot, lag_allowed, progress or bar)
    finally:
        if bar is not None:
            bar.end()


def _read_through(
    copy: EventSource,
    against: EventSource | None,
    tables: LeaseQueue | None,
    after: int,
    snapshot: str | Path | None,
    lag_allowed: int,
    progress: Progress | None,
) -> Report:
    replica = _beginning(after, snapshot, tables)
    good = after = after if replica is None else replica.number
    head = None if tables is None else _comparable(tables, copy, after)
    others = each_event(against, after, _TOGETHER) if against is not None else iter(())
    if wrong := _at_head(tables, replica, head):
        return wrong
    try:
        for event in each_event(copy, after, _TOGETHER):
            problem = _problem(event, good, replica, others if against is not None else None)
            if problem:
                return Report(good, problem)
            good = event.sequence_number
            if progress is not None and good % _TOGETHER == 0:
                progress(good, head)
            if wrong := _at_head(tables, replica, head):
                return wrong
        behind = 0 if against is None else _left(against, others, good)
    except CorruptCopy as damage:
        return Report(good, f"{damage.place}: {damage.problem}")
    if behind > lag_allowed:
        return Report(good, f"the copy ends at {good}, and the other has events up to {good + behind}", behind)
    if head is not None and good < head:
        return Report(good, f"the copy ends here, but the queue has events up to {head}", behind)
    if progress is not None:
        progress(good, good)
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


def _beginning(after: int, snapshot: str | Path | None, tables: LeaseQueue | None) -> Replica | None:
    """The items as they stand where reading begins. None: that is not known."""
    if snapshot is not None:
        return Expected.from_snapshot(snapshot)
    if after:
        return None
    return Replica() if tables is None else Expected()


def _comparable(tables: LeaseQueue, copy: EventSource, after: int) -> int:
    """The number of the last event that made the rows what they are, if the copy can explain them from ``after`` on."""
    head = tables.stats().head
    if head < after:
        raise InvalidInput("snapshot", f"is as of event {after}, but the queue has events up to {head} only")
    try:
        good_events(copy, after, 1)
    except CorruptCopy:
        pass  # it is told of where it is read
    except EventsPruned as gap:
        raise InvalidInput(
            "tables",
            f"cannot be compared: the log begins with event {gap.oldest}, and how the items stood then is not known. "
            "Give a snapshot, such as the one that the queue was rebuilt from (snapshot=, or --snapshot FILE), or "
            "verify by a copy that has the whole log",
        ) from gap
    return head


def _at_head(queue: LeaseQueue | None, replica: Replica | None, head: int | None) -> Report | None:
    """What is wrong with the queue's rows, if anything is and the log was read up to ``head``, where they stand."""
    if queue is None or not isinstance(replica, Expected) or replica.number != head:
        return None
    problem = difference(queue, replica)
    if problem is None:
        return None
    if queue.stats().head != head:
        return Report(head, "the queue went on while it was compared; seal it, stop its users, or repeat")
    return Report(max(head - 1, 0), problem)
