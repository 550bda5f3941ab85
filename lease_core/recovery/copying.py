"""Writing a log into another database, item by item as it happened: what rebuilding and standing by have in common.

Events go in by the order of the log, many in one transaction, through the state machine that decided them. Rows and
log move together, so whatever is there after a crash is the queue as of some number, and copying goes on from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import msgspec

from lease_core import leaving, log, payload
from lease_core.entering import keep_origin, with_key
from lease_core.log import Entry, Gathered
from lease_core.machine import Claim, Moved, Outcome, Span, State, decide, replace
from lease_core.model import ErrorRecord, EventType, LeaseEvent, WorkItem, to_datetime
from lease_core.recovery import sealing
from lease_core.recovery.room import enters, parts
from lease_core.replay import ReplayDiverged, Told, as_restored
from lease_core.store import selects
from lease_core.store.base import Row, Store, Transaction
from lease_core.unit import SealedUnit


def gathered(events: Sequence[LeaseEvent]) -> list[Gathered]:
    """Events as they are to be stored. They must be dense."""
    for before, event in pairwise(events):
        if event.sequence_number != before.sequence_number + 1:
            raise ReplayDiverged(
                event.sequence_number, f"follows {before.sequence_number}; events are missing or doubled"
            )
    return list(log.gather(events))


def apply(store: Store, ns: int, name: str, groups: Sequence[Gathered]) -> int:
    """Bring the sealed copy ``name`` forward by ``groups``, which follow what it holds. Gives how far it has come.

    Raises ``ReplayDiverged``, and goes no further, at an event that could not have happened to the items as they stand,
    and ``HistoryDiffers`` if it has taken over since.
    """
    number = 0
    for part in parts(store, ns, name, groups):
        number = store.run(
            ns,
            lambda transaction, part=part: _apply(store, transaction, ns, name, part),  # type: ignore[misc]
        )
        if number < part[-1].last:
            break  # another process brings the same copy forward, too: what is left is to be read from there
    return number


def _apply(store: Store, transaction: Transaction, ns: int, name: str, groups: list[Gathered]) -> int:
    copy = _CopyingUnit(store, transaction)
    sealing.check_follows(copy, ns, name)
    fresh = [group for group in groups if group.last > copy.head.number]
    if fresh and fresh[0].first > copy.head.number:
        copy.take_in(fresh)
    return copy.head.number


class _CopyingUnit(SealedUnit):
    """A unit of work that lets happen what an event says, and keeps the event itself."""

    def take_in(self, groups: list[Gathered]) -> None:
        rows = self._read(groups)
        for group in groups:
            if group.first != self.head.number + 1:
                raise ReplayDiverged(group.first, f"follows {self.head.number}; events are missing or out of order")
            number = group.first
            for entry, items in zip(group.entries, group.items, strict=True):
                self._happen(entry, items, number, group.at, rows)
                number += entry.n
            self.transaction.log(group.first, group.last, group.document(), group.at)
        self.now = groups[-1].at
        if self.lanes:  # who comes first was settled among others than those who are in the lanes now
            sql = f"UPDATE omnirelay_span SET ready = 0 WHERE ns = ? AND state = 1 AND key {self.store.member}"
            self.transaction.write(sql, (self.ns, self.store.pack(sorted(self.lanes))), last=True)
        self.write_spans()
        self.write_head()

    def _read(self, groups: list[Gathered]) -> dict[int, Row]:
        """Load the spans of all items concerned; give the rows of those that come in and are here already."""
        entries = [entry for group in groups for entry in group.entries if entry.id is not None]
        ranges = _ranges(entries)
        here = selects.items(self.store, self.ns, _ranges([entry for entry in entries if enters(entry)]))
        spans = selects.overlapping(self.store, self.ns, ranges)
        found = self.fetch(*spans, *here)
        self.load(chain.from_iterable(found[: len(spans)]))
        return {row[0]: row for row in chain.from_iterable(found[len(spans) :])}

    def _happen(self, entry: Entry, items: list[WorkItem], number: int, at: int, rows: dict[int, Row]) -> None:
        self.head.number = number + entry.n - 1
        if entry.type == EventType.BACKPRESSURE_CHANGED:
            self.head.backpressure = int(entry.metadata.get("active") == "true")
        elif enters(entry):
            self._come_in(entry, items, number, at, rows)
        elif entry.id is not None and entry.type in _MOVES:
            self._move(entry, items, number, at)
        self._agree(entry)

    def _come_in(self, entry: Entry, items: list[WorkItem], number: int, at: int, rows: dict[int, Row]) -> None:
        if entry.id is None or len(items) != entry.n:
            raise ReplayDiverged(number, "the event lacks its item")
        head = self.head
        enqueued_at = at if entry.enqueued_at is None else entry.enqueued_at
        start = 0
        for stop in range(1, entry.n + 1):
            alike = head.exclusive is None and stop < entry.n and items[stop].priority == items[start].priority
            if alike:
                continue
            span = with_key(self, _entering(entry, start, stop, items[start].priority, at), items[start])
            self._make_way(span, number + start)
            self.add(span if span.state is State.PENDING else replace(span, key=None))
            self.keep_error(span, *entry.errors)
            start = stop
        new = [(entry.id + i, enqueued_at, item) for i, item in enumerate(items) if entry.id + i not in rows]
        self.transaction.insert_items([payload.to_row(*each) for each in new])
        head.next_id = max(head.next_id, entry.id + entry.n)
        if origin := entry.metadata.get("originQueue"):
            namespace = entry.metadata.get("originNamespace") or None
            keep_origin(self, origin, int(entry.metadata["originId"]), namespace, entry.id)

    def _make_way(self, span: Span, number: int) -> None:
        """A drained item that comes back from elsewhere stands as it did there, not as it did here."""
        for first, last, present in list(self.parts(span.first, span.last)):
            if present is None:
                continue
            if present.state is not State.DRAINED:
                raise ReplayDiverged(number + first - span.first, f"item {first} is here already")
            part = self.carve(present, first, last)
            self.forget_errors([part])
            self.drop(part)

    def _move(self, entry: Entry, items: list[WorkItem], number: int, at: int) -> None:
        assert entry.id is not None
        for first, last, span in list(self.parts(entry.id, entry.id + entry.n - 1)):
            offset = first - entry.id
            if span is None:
                raise ReplayDiverged(number + offset, f"item {first} never entered")
            if entry.type == EventType.DEAD_LETTERED:
                if span.state is not State.DEAD:
                    raise ReplayDiverged(number + offset, "the item did not die in the event before")
                continue
            part = self.carve(span, first, last)
            outcome = _decide(entry, offset, number, part, at)
            if not isinstance(outcome, Moved):
                raise ReplayDiverged(number + offset, f"{entry.type} of item {first}: {outcome}")
            self._let(part, outcome, entry, items[offset : offset + len(part)], at)

    def _let(self, part: Span, outcome: Moved, entry: Entry, items: list[WorkItem], at: int) -> None:
        to = outcome.to
        if part.key is not None:
            self.lanes.add(part.key)
        if to is None:
            self.become(part, None)
            leaving.forget(self, [part])
            return
        if entry.type == EventType.RESTORED and items and self.head.exclusive:
            self._reopen_lanes(part, to, items)
        else:
            self.become(part, to)
        if entry.error is not None and entry.type in (EventType.FAILED, EventType.EXPIRED):
            self.keep_error(part, ErrorRecord(part.leased_attempt, to_datetime(at), entry.error, entry.peer))

    def _reopen_lanes(self, part: Span, to: Span, items: list[WorkItem]) -> None:
        for one, item in enumerate(items, part.first):
            self.become(self.carve(part, one, one), with_key(self, to.cut(one, one), item))
            part = part.cut(one + 1, part.last) if one < part.last else part

    def _agree(self, entry: Entry) -> None:
        told = (entry.pending + entry.pending_step * entry.n, entry.active + entry.active_step * entry.n)
        counted = (self.head.pending, self.head.active)
        if told != counted and entry.type in _COUNTED:
            raise ReplayDiverged(
                self.head.number,
                f"counted {counted[0]} pending, {counted[1]} active; the event says {told[0]}, {told[1]}",
            )


_MOVES = frozenset(EventType) - {EventType.ENQUEUED, EventType.BACKPRESSURE_CHANGED}
_COUNTED = frozenset(EventType)


def _entering(entry: Entry, start: int, stop: int, priority: int, at: int) -> Span:
    assert entry.id is not None
    available_at = at if entry.available_at is None else entry.available_at
    span = Span(entry.id + start, entry.id + stop - 1, State.PENDING, priority, available_at)
    if entry.type == EventType.ENQUEUED:
        return span
    used = (entry.attempt if entry.used is None else entry.used) or 0
    claim = None if entry.lease is None else Claim(entry.attempt or 0, entry.lease, (entry.fence or 0) + start)
    return as_restored(span, bool(entry.requeued), used, claim, bool(entry.errors))


def _decide(entry: Entry, offset: int, number: int, part: Span, at: int) -> Outcome:
    granted = entry.type == EventType.LEASE_GRANTED
    told = Told(
        entry.type,
        Claim(entry.attempt or 0, entry.lease or "", (number if granted else entry.fence or 0) + offset),
        entry.peer or "",
        entry.expires_at or 0,
        at if entry.available_at is None else entry.available_at,
        bool(entry.requeued),
        None if entry.result is msgspec.UNSET else bytes(entry.result),
    )
    if granted:  # what was ready stays so, even if the clock stepped back since
        part = replace(part, available_at=min(part.available_at, at))
    command = told.command(part, at)
    assert command is not None, "only what moves items comes here"
    return decide(part, command, at)


def _ranges(entries: list[Entry]) -> list[selects.Range]:
    return selects.merged(sorted((entry.id or 0, (entry.id or 0) + entry.n - 1) for entry in entries))
