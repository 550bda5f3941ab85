"""Writing a log into another database, item by item as it happened: what rebuilding and standing by have in common.

Events go in by the order of the log, many in one transaction, through the state machine that decided them. Rows and
log move together, so whatever is there after a crash is the queue as of some number, and copying goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import msgspec

from lease_core import leaving, log, payload
from lease_core.entering import by_request_id, keep_origin, with_key
from lease_core.log import Entry
from lease_core.machine import Claim, Moved, Outcome, Span, State, decide, replace
from lease_core.model import ErrorRecord, EventType, LeaseEvent, WorkItem, to_datetime
from lease_core.replay import ReplayDiverged, Told, as_restored
from lease_core.store import selects
from lease_core.store.base import Query, Row, Store, Transaction
from lease_core.unit import SealedUnit, Unit

_ENQUEUED, _RESTORED, _PURGED = str(EventType.ENQUEUED), str(EventType.RESTORED), str(EventType.PURGED)


def apply(store: Store, ns: int, events: Sequence[LeaseEvent]) -> int:
    """Bring a sealed copy forward by ``events``, which follow what it holds. Gives the number it has come to.

    Raises ``ReplayDiverged``, and goes no further, at an event that could not have happened to the items as they stand.
    """
    for before, event in pairwise(events):
        if event.sequence_number != before.sequence_number + 1:
            raise ReplayDiverged(
                event.sequence_number, f"follows {before.sequence_number}; events are missing or doubled"
            )
    number = 0
    for part in _parts(events):
        _make_room(store, ns, part)
        number = store.run(ns, lambda transaction, part=part: _apply(store, transaction, part))  # type: ignore[misc]
    return number


def _parts(events: Sequence[LeaseEvent]) -> Iterator[list[LeaseEvent]]:
    """Events that may share a transaction.

    What removes rows, or puts others in their place, has one of its own: within a transaction statements are sent
    together, and must not depend on each other's order.
    """
    part: list[LeaseEvent] = []
    kind = ""
    requests: set[str] = set()
    for event in events:
        type_ = event.type
        this, request = "moves", None
        if type_ == _ENQUEUED and event.item is not None:
            request = event.item.request_id
        elif type_ == _PURGED:
            this = "removes"
        elif type_ == _RESTORED and event.enqueued_at is not None:
            this, request = "replaces", event.item.request_id if event.item else None
        # a request that comes twice: its first item was forgotten in between
        if part and (this != kind or (request is not None and request in requests)):
            yield part
            part, requests = [], set()
        kind = this
        part.append(event)
        if request is not None:
            requests.add(request)
    if part:
        yield part


def _apply(store: Store, transaction: Transaction, events: list[LeaseEvent]) -> int:
    copy = _CopyingUnit(store, transaction)
    copy.fetch()
    fresh = [event for event in events if event.sequence_number > copy.head.number]
    if not fresh:
        return copy.head.number
    copy.take_in(fresh)
    return copy.head.number


class _CopyingUnit(SealedUnit):
    """A unit of work that lets happen what an event says, and keeps the event itself."""

    def take_in(self, events: list[LeaseEvent]) -> None:
        first = events[0].sequence_number
        if first != self.head.number + 1:
            raise ReplayDiverged(first, f"follows {self.head.number}; events are missing or out of order")
        groups = list(log.gather(events))
        self.time = groups[-1].at
        rows = self._read(events)
        for group in groups:
            number = group.first
            for entry, items in zip(group.entries, group.items, strict=True):
                self._happen(entry, items, number, group.at, rows)
                number += entry.n
            self.transaction.log(group.first, group.last, group.document(), group.at)
        self.now = self.time
        self.write_spans()
        self.write_head()

    def _read(self, events: list[LeaseEvent]) -> dict[int, Row]:
        """Load the spans of all items concerned; give the rows of those that come in and are here already."""
        ids = sorted({event.sequence_id for event in events if event.sequence_id is not None})
        ranges = selects.merged([(i, i) for i in ids])
        entering = [event.sequence_id for event in events if _enters(event)]
        here = selects.items(self.store, self.ns, selects.merged([(i, i) for i in sorted(filter(None, entering))]))
        spans = selects.overlapping(self.store, self.ns, ranges)
        found = self.fetch(*spans, *here)
        self.load(chain.from_iterable(found[: len(spans)]))
        return {row[0]: row for row in chain.from_iterable(found[len(spans) :])}

    def _happen(self, entry: Entry, items: list[WorkItem], number: int, at: int, rows: dict[int, Row]) -> None:
        self.head.number = number + entry.n - 1
        if entry.type == EventType.BACKPRESSURE_CHANGED:
            self.head.backpressure = int(entry.metadata.get("active") == "true")
        elif entry.type == EventType.ENQUEUED or (entry.type == EventType.RESTORED and entry.enqueued_at is not None):
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
        for offset, item in enumerate(items):
            one = part.first + offset
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


def _enters(event: LeaseEvent) -> bool:
    return event.type == _ENQUEUED or (event.type == _RESTORED and event.enqueued_at is not None)


def _make_room(store: Store, ns: int, events: list[LeaseEvent]) -> None:
    """Forget finished items whose ids or request ids come in anew: the queue had forgotten them when that happened."""
    coming = {event.sequence_id: event for event in events if _enters(event) and event.item is not None}
    if coming and _is_crowded(store, ns, coming):
        store.run(ns, lambda transaction: _forget_old(store, transaction, coming))


Coming = dict[int | None, LeaseEvent]


def _is_crowded(store: Store, ns: int, coming: Coming) -> bool:
    queries = [Query("SELECT 1 FROM omnirelay_item WHERE ns = ? AND id >= ? LIMIT 1", (ns, min(filter(None, coming))))]
    if requests := _requests(coming):
        sql = f"SELECT 1 FROM omnirelay_item WHERE ns = ? AND request_id {store.member} LIMIT 1"
        queries.append(Query(sql, (ns, store.pack(sorted(requests)))))
    return any(store.read(*queries))


def _requests(coming: Coming) -> dict[str, int | None]:
    return {event.item.request_id: i for i, event in coming.items() if event.item and event.item.request_id is not None}


def _forget_old(store: Store, transaction: Transaction, coming: Coming) -> None:
    unit = _CopyingUnit(store, transaction)
    unit.fetch()
    if unit.head.number >= min(event.sequence_number for event in coming.values()):
        return  # these came in before a crash: nothing is in their way but they themselves
    requests = _requests(coming)
    found = chain.from_iterable(unit.fetch(*by_request_id(unit, sorted(requests))))
    old = {own for request, own in found if requests[request] != own}
    ranges = selects.merged(sorted((i, i) for i in coming if i is not None))
    for row in chain.from_iterable(unit.fetch(*selects.items(store, transaction.ns, ranges))):
        if not _is_back(row, coming[row[0]]):
            old.add(row[0])
    gone = [
        unit.carve(span, first, last)
        for first, last, span in _standing(unit, old)
        if span is not None and span.state in (State.COMPLETED, State.DRAINED)
    ]
    for span in gone:
        unit.drop(span)
    leaving.forget(unit, gone)
    unit.write_spans()


def _standing(unit: Unit, ids: set[int]) -> list[tuple[int, int, Span | None]]:
    ranges = selects.merged(sorted((i, i) for i in ids))
    unit.load(chain.from_iterable(unit.fetch(*selects.overlapping(unit.store, unit.ns, ranges))))
    return [part for lo, hi in ranges for part in list(unit.parts(lo, hi))]


def _is_back(row: Row, event: LeaseEvent) -> bool:
    """Whether the item that comes in is the one that was here before."""
    item = event.item
    return item is not None and payload.to_item(row, item.priority) == item
