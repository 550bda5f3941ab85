"""A unit of work: what one operation has read, what it makes of it, and the log entries that say so.

Operations load spans, cut them, and apply the machine's outcomes. Nothing reaches the database until ``flush`` hands
the difference between what was read and what became of it to the transaction, together with the log document, the
head row and, where depth crossed a mark, the backpressure event: all in the same commit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from lease_core import log
from lease_core.errors import QueueSealed
from lease_core.log import Entry, Name
from lease_core.machine import Moved, Span, State, join
from lease_core.model import ErrorRecord, EventType, WorkItem, to_datetime, to_micros
from lease_core.store import selects
from lease_core.store.base import Head, Query, Row, Store, Transaction
from lease_core.store.selects import LONGEST_ERROR_SPAN, to_span

T = TypeVar("T")

Names = Callable[[int], Name]

_UPDATE_SPAN = (
    "UPDATE omnirelay_span SET last = ?, state = ?, ready = ?, priority = ?, available_at = ?, attempt = ?, "
    "lease_id = ?, owner = ?, fence = ?, expires_at = ?, ended = ?, key = ?, result = ?, has_errors = ? "
    "WHERE ns = ? AND first = ? AND last = ? AND state = ? AND attempt = ? "
    "AND coalesce(lease_id, '') = ? AND coalesce(expires_at, 0) = ?"
)
_DELETE_SPAN = (
    "DELETE FROM omnirelay_span WHERE ns = ? AND first = ? AND last = ? AND state = ? AND attempt = ? "
    "AND coalesce(lease_id, '') = ? AND coalesce(expires_at, 0) = ?"
)
_DELETE_WAITING = "DELETE FROM omnirelay_span WHERE ns = ? AND state = 1 AND first {member}"
_INSERT_SPAN = (
    "INSERT INTO omnirelay_span (last, state, ready, priority, available_at, attempt, lease_id, owner, fence, "
    "expires_at, ended, key, result, has_errors, ns, first) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_UPDATE_HEAD = (
    f"UPDATE omnirelay_head SET {', '.join(f'{field} = ?' for field in Head.__struct_fields__[4:])} "
    "WHERE ns = ? AND number = ? AND epoch = ?"  # the first four are what a namespace is born with
)
_INSERT_ERROR = (
    "INSERT INTO omnirelay_error (ns, last, number, nth, first, attempt, at, peer, error) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_ERROR_KEY = "ns = ? AND last = ? AND number = ? AND nth = ?"
# Exactly one item of a key is leased or can be; when there is none, it is the key's first.
_OPEN_LANES = (
    "UPDATE omnirelay_span SET ready = CASE WHEN available_at <= ? THEN 1 ELSE 2 END WHERE ns = ? AND first IN ("
    "SELECT min(w.first) FROM omnirelay_span w WHERE w.ns = ? AND w.key {member} GROUP BY w.key "
    "HAVING sum(CASE WHEN w.state = 2 OR w.ready <> 0 THEN 1 ELSE 0 END) = 0)"
)

BLOCKED, READY, DELAYED = 0, 1, 2


class Unit:
    works_sealed = False  # only what keeps a copy may write to a sealed namespace

    def __init__(self, store: Store, transaction: Transaction) -> None:
        self.store = store
        self.transaction = transaction
        self.entries: list[Entry] = []
        self.lanes: set[str] = set()
        self.offers_work = False
        self.makes_room = False
        self._names: list[list[Name]] = []
        self._originals: dict[int, Span] = {}
        self._live: dict[int, Span] = {}
        self._firsts: list[int] = []
        self._errors: list[tuple[Any, ...]] = []
        self._forgotten: list[selects.Range] = []
        self._head_touched = False

    def fetch(self, *queries: Query) -> list[list[Row]]:
        """Read under the lock. The first call begins the transaction; until then there is no head and no time."""
        rows = self.transaction.fetch(*queries)
        self.head = self.transaction.head
        self.now = self.transaction.now
        self.ns = self.head.ns
        if self.head.epoch < 0 and not self.works_sealed:
            raise QueueSealed(
                f"namespace {self.head.namespace!r}: this copy is sealed, because it follows another or another has "
                "taken over; nothing was written. Open the queue at the copy that is primary now"
            )
        self._number_before = getattr(self, "_number_before", self.head.number)
        return rows

    # Spans

    def load(self, rows: Iterable[Row]) -> list[Span]:
        """Take spans that were read into the unit; one that is here already keeps its current form."""
        spans = []
        for row in rows:
            if row[0] not in self._originals:
                span = to_span(row)
                self._originals[span.first] = span
                self._add(span)
            if row[0] in self._live:
                spans.append(self._live[row[0]])
        return spans

    def parts(self, lo: int, hi: int) -> Iterator[tuple[int, int, Span | None]]:
        """The id range cut along the loaded spans: ids with the whole span they are in, or None where there is none."""
        at = max(bisect_right(self._firsts, lo) - 1, 0)
        for first in self._firsts[at : bisect_right(self._firsts, hi)]:
            span = self._live[first]
            if span.last < lo:
                continue
            if span.first > lo:
                yield lo, span.first - 1, None
                lo = span.first
            end = min(span.last, hi)
            yield lo, end, span
            lo = end + 1
        if lo <= hi:
            yield lo, hi, None

    def carve(self, span: Span, first: int, last: int) -> Span:
        """Cut the part ``first`` to ``last`` out of a loaded span, leaving the rest as it is."""
        if first == span.first and last == span.last:
            return span
        self._remove(span)
        if span.first < first:
            self._add(span.cut(span.first, first - 1))
        if last < span.last:
            self._add(span.cut(last + 1, span.last))
        middle = span.cut(first, last)
        self._add(middle)
        return middle

    def add(self, span: Span) -> None:
        """A span of items that are new here."""
        self._add(span)
        self._count(span, 1)
        self._open_to_others(None, span)

    def drop(self, span: Span) -> None:
        """Forget a span without a word in the log: its items finished long ago."""
        self._remove(span)

    def apply(
        self,
        span: Span,
        outcome: Moved,
        names: Names | None = None,
        *,
        peer: str | None = None,
        principal: str | None = None,
        error: str | None = None,
        items: list[WorkItem] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Span | None:
        """Let the span become what the machine decided, with its events. Gives the new span."""
        to = outcome.to
        was_pending, was_active = span.state is State.PENDING, span.state is State.LEASED
        to_pending, to_active = (to.state is State.PENDING, to.state is State.LEASED) if to else (False, False)
        pending_step, active_step = to_pending - was_pending, to_active - was_active
        for event in outcome.events:
            described = to if to is not None and event is EventType.LEASE_GRANTED else span
            requeued = event in (EventType.FAILED, EventType.EXPIRED, EventType.RESTORED)
            waits = to if to_pending else None
            entry = Entry(
                event,
                n=len(span),
                id=span.first,
                pending=self.head.pending,
                active=self.head.active,
                pending_step=pending_step,
                active_step=active_step,
                peer=peer or described.owner,
                principal=principal,
                attempt=described.leased_attempt if described.lease_id else described.attempt,
                lease=described.lease_id,
                fence=described.fence or None,
                expires_at=to.expires_at if to_active and to else None,
                available_at=waits.available_at if waits else None,
                requeued=to_pending if requeued else None,
                error=error,
                metadata=metadata or {},
                items=None if items is None else [log.raw(item) for item in items],
            )
            if event is EventType.COMPLETED and to is not None and to.result is not None:
                entry.result = msgspec.Raw(to.result)
            named = [] if names is None or items is not None else [names(i) for i in range(span.first, span.last + 1)]
            self.record(entry, named)
            if error is not None and event in (EventType.FAILED, EventType.EXPIRED):
                self.keep_error(
                    span, ErrorRecord(span.leased_attempt, to_datetime(self.now), error, peer or span.owner)
                )
            self.head.pending += pending_step * len(span)
            self.head.active += active_step * len(span)
            pending_step = active_step = 0
        self._become(span, to)
        return to

    def become(self, span: Span, to: Span | None) -> None:
        """Let the span become ``to``, of which the log knows already."""
        for each, sign in ((span, -1), (to, 1)):
            if each is not None and each.state is State.PENDING:
                self.head.pending += sign * len(each)
            elif each is not None and each.state is State.LEASED:
                self.head.active += sign * len(each)
        self._become(span, to)

    def _become(self, span: Span, to: Span | None) -> None:
        self._remove(span)
        if to is not None and to.expires_at is not None:
            self.head.next_expiry = min(self.head.next_expiry or to.expires_at, to.expires_at)
        if span.state is State.DEAD:
            self.head.dead -= len(span)
        if to is not None:
            self._add(to)
            self.head.dead += len(to) if to.state is State.DEAD else 0
            self.head.completed += len(to) if to.state is State.COMPLETED and span.state is not State.COMPLETED else 0
        self._open_to_others(span, to)

    def _count(self, span: Span, sign: int) -> None:
        if span.state is State.PENDING:
            self.head.pending += sign * len(span)
        elif span.state is State.DEAD:
            self.head.dead += sign * len(span)

    def _open_to_others(self, span: Span | None, to: Span | None) -> None:
        """Note what this change means to others: work to take, room to fill, a key that is free."""
        if to is not None and to.state is State.PENDING:
            self.offers_work = True
            if to.key is not None and (span is None or span.key is None):
                self.lanes.add(to.key)
        if span is not None:
            if span.state is State.PENDING and not (to and to.state is State.PENDING):
                self.makes_room = True
            if span.key is not None and (to is None or to.key is None):
                self.lanes.add(span.key)
                self.offers_work = True

    def _add(self, span: Span) -> None:
        self._live[span.first] = span
        insort(self._firsts, span.first)

    def _remove(self, span: Span) -> None:
        del self._live[span.first]
        del self._firsts[bisect_left(self._firsts, span.first)]

    # The log

    def record(self, entry: Entry, names: Sequence[Name] = ()) -> int:
        """Append events. Gives the number of the first of them."""
        first = self.head.number + 1
        self.head.number += entry.n
        if self.entries and names and _continues(self.entries[-1], entry):
            self.entries[-1].n += entry.n
            self._names[-1].extend(names)
        else:
            self.entries.append(entry)
            self._names.append(list(names))
        return first

    def keep_error(self, span: Span, *records: ErrorRecord) -> None:
        """Remember why the span's items failed, apart from the log, which may be pruned."""
        for first in range(span.first, span.last + 1, LONGEST_ERROR_SPAN):
            last = min(first + LONGEST_ERROR_SPAN - 1, span.last)
            for nth, record in enumerate(records):
                what = (record.attempt, to_micros(record.at), record.peer_id, record.error)
                self._errors.append((self.ns, last, self.head.number, nth, first, *what))

    def unsaved_errors(self) -> list[tuple[int, int, str]]:
        """First id, last id and text of each error kept in this unit."""
        return [(first, last, error) for _, last, _, _, first, _, _, _, error in self._errors]

    def forget_errors(self, spans: Sequence[Span]) -> None:
        """Let no error row that is stored cover items of these spans any more."""
        self._forgotten += [(span.first, span.last) for span in spans if span.has_errors]

    def _cut_error(self, row: Row, gone: Sequence[selects.Range]) -> None:
        first, last, number, nth, *what = row
        key = (self.ns, last, number, nth)
        *others, end = selects.without((first, last), gone) or [(0, 0)]
        if end[1] == last:
            self.transaction.write(f"UPDATE omnirelay_error SET first = ? WHERE {_ERROR_KEY}", (end[0], *key))
        else:
            self.transaction.write(f"DELETE FROM omnirelay_error WHERE {_ERROR_KEY}", key)
            others += [end] if end[1] else []
        for lo, hi in others:
            self.transaction.write(_INSERT_ERROR, (self.ns, hi, number, nth, lo, *what))

    # Writing

    def touch_head(self) -> None:
        """Have the head row written even if nothing else is."""
        self._head_touched = True

    def flush(self) -> None:
        """Hand everything to the transaction, to be written when it commits."""
        self.write_spans()
        self._decide_backpressure()
        if self.entries:
            for entry, names in zip(self.entries, self._names, strict=True):
                if names:
                    log.name_entry(entry, names)
            document = log.encode(self.now, self.entries)
            self.transaction.log(self._number_before + 1, self.head.number, document, self.now)
            self._wake_others()
        if self.entries or self._head_touched:
            self.write_head()

    def write_spans(self) -> None:
        """Hand over how the items stand now, and why they failed."""
        self._write_changes()
        self._write_errors()
        if self.lanes:
            sql = _OPEN_LANES.format(member=self.store.member)
            lanes = self.store.pack(sorted(self.lanes))
            self.transaction.write(sql, (self.now, self.ns, self.ns, lanes), last=True)
            # what comes first in a lane now may be due at any time
            self.head.next_due = min(self.head.next_due or self.now, self.now)

    def _write_errors(self) -> None:
        """A row is cut once for all that is forgotten: cut one by one, each would be cut from what is stored."""
        gone = selects.merged(sorted(self._forgotten))
        if gone:
            for row in set(chain.from_iterable(self.fetch(*selects.errors(self.store, self.ns, gone)))):
                self._cut_error(row, gone)
        for error in self._errors:
            self.transaction.write(_INSERT_ERROR, error)

    def _write_changes(self) -> None:
        new = {span.first: span for span in join(list(self._live.values()))}
        waiting = []
        for original in self._originals.values():
            span = new.pop(original.first, None)
            if span == original:
                continue
            was = (
                original.last,
                original.state,
                original.attempt,
                original.lease_id or "",
                original.expires_at or 0,
            )
            if span is not None:
                self.transaction.write(_UPDATE_SPAN, (*self._row(span), self.ns, original.first, *was), 1)
            elif original.state is State.PENDING:
                waiting.append(original.first)
            else:
                self.transaction.write(_DELETE_SPAN, (self.ns, original.first, *was), 1)
        if waiting:
            sql = _DELETE_WAITING.format(member=self.store.member)
            self.transaction.write(sql, (self.ns, self.store.pack(waiting)), len(waiting))
        for first, span in new.items():
            self.transaction.write(_INSERT_SPAN, (*self._row(span), self.ns, first))

    def _row(self, span: Span) -> tuple[Any, ...]:
        return (
            span.last,
            span.state.value,
            self._readiness(span),
            span.priority,
            span.available_at,
            span.attempt,
            span.lease_id,
            span.owner,
            span.fence,
            span.expires_at,
            span.ended and span.ended.value,
            span.key,
            span.result,
            int(span.has_errors),
        )

    def _readiness(self, span: Span) -> int:
        if span.state is State.PENDING:
            if span.key in self.lanes:
                return BLOCKED  # new to its key's lane, which is looked at after this is written
            if span.available_at > self.now:
                self.head.next_due = min(self.head.next_due or span.available_at, span.available_at)
                return DELAYED
        return READY

    def _decide_backpressure(self) -> None:
        head = self.head
        if head.backpressure:
            active = head.high_mark is not None and head.pending > (head.low_mark or 0)
        else:
            active = head.high_mark is not None and head.pending >= head.high_mark
        if active == bool(head.backpressure):
            return
        head.backpressure = int(active)
        self.makes_room |= not active
        marks = {"highWatermark": head.high_mark, "lowWatermark": head.low_mark}
        metadata = {"active": str(active).lower()} | {k: str(v) for k, v in marks.items() if v is not None}
        self.record(Entry(EventType.BACKPRESSURE_CHANGED, pending=head.pending, active=head.active, metadata=metadata))

    def _wake_others(self) -> None:
        head = self.head
        if (self.offers_work and head.lease_wait_until > self.now) or (
            self.makes_room and head.enqueue_wait_until > self.now
        ):
            self.transaction.notify()

    def write_head(self) -> None:
        values = msgspec.structs.astuple(self.head)[4:]
        self.transaction.write(_UPDATE_HEAD, (*values, self.ns, self._number_before, self.head.epoch), 1)


def _continues(entry: Entry, following: Entry) -> bool:
    """Whether ``following`` says the same of the next items, so that one entry can speak for all."""
    return (
        entry.id is not None
        and following.id == entry.id + entry.n
        and entry.items is None
        and following.items is None
        and following.fence == (entry.fence and entry.fence + entry.n)
        and all(
            getattr(entry, field) == getattr(following, field)
            for field in (
                "type",
                "lease",
                "attempt",
                "peer",
                "principal",
                "expires_at",
                "available_at",
                "requeued",
                "error",
                "result",
                "metadata",
                "pending_step",
                "active_step",
            )
        )
    )


class SealedUnit(Unit):
    """A unit of work for what goes on in a sealed copy, too: following, and keeping the places of readers."""

    works_sealed = True


def run(store: Store, ns: int, work: Callable[[Unit], T], kind: type[Unit] = Unit) -> T:
    """Do ``work`` on a namespace in one transaction. It may be called more than once; the last call is what counts."""

    def whole(transaction: Transaction) -> T:
        unit = kind(store, transaction)
        result = work(unit)
        unit.flush()
        return result

    return store.run(ns, whole)
