"""A queue's rows against what its log makes of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lease_core import payload, reading
from lease_core.machine import Span, State
from lease_core.model import ErrorRecord, EventType, LeaseEvent, to_datetime, to_micros
from lease_core.queue import LeaseQueue
from lease_core.recovery.snapshot import batches, read_header
from lease_core.replay import Replica
from lease_core.store import selects
from lease_core.store.base import Head, Query, Row

_TOGETHER = 1_000
_FORGOTTEN = (State.COMPLETED, State.DRAINED)  # some time after they have come to that
_WAITING = (State.PENDING, State.LEASED)
_FAILURES = (EventType.FAILED, EventType.EXPIRED)
_encode = msgspec.json.Encoder().encode

# ids from one to another that a table speaks of, a page of them at a time
_MENTIONED = {
    "a state": "SELECT first, last FROM omnirelay_span WHERE ns = ? AND first > ? ORDER BY first LIMIT ?",
    "a row": "SELECT id, id FROM omnirelay_item WHERE ns = ? AND id > ? ORDER BY id LIMIT ?",
    "errors": "SELECT min(first), last FROM omnirelay_error WHERE ns = ? AND last > ? GROUP BY last ORDER BY 2 LIMIT ?",
}
# what nobody would ever lease: without a key an item is ready or delayed; of a key's items exactly one is, or is leased
_BLOCKED = "SELECT min(first) FROM omnirelay_span WHERE ns = ? AND state = 1 AND key IS NULL AND ready NOT IN (1, 2)"
_LANES = (
    "SELECT min(first) FROM omnirelay_span WHERE ns = ? AND key IS NOT NULL GROUP BY key "
    "HAVING sum(CASE WHEN state = 2 OR ready <> 0 THEN 1 ELSE 0 END) <> 1 LIMIT 1"
)
_DUE = "SELECT min(available_at) FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 2"
_EXPIRY = "SELECT min(expires_at) FROM omnirelay_span WHERE ns = ? AND state = 2"


class Expected(Replica):
    """The items as the log leaves them and, beyond what a replica knows, all else that the rows say of them.

    An item's errors are known by the sum of their digests: their texts would need far more room than the items.
    """

    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1
        self.completed = 0
        self.enqueued_at: dict[int, int] = {}
        self.errors: dict[int, int] = {}

    @classmethod
    def from_snapshot(cls, path: str | Path) -> Expected:
        """The items as they stand in a snapshot. Raises ``CorruptCopy`` if it is not what was written."""
        header = read_header(path)
        made = cls()
        made.number, made.next_id = header.sequence_number, header.head["next_id"]
        made.pending, made.active = header.head["pending"], header.head["active"]
        made.completed, made.backpressure = header.head["completed"], bool(header.head["backpressure"])
        for name, rows in batches(Path(path)):
            for row in rows:
                made._take(name, row)
        return made

    def _take(self, table: str, row: list[Any]) -> None:
        """A row of a snapshot, with all columns of its table but the namespace. Items come before their states."""
        match table, row:
            case "item", [sequence_id, enqueued_at, *columns]:
                self.items[sequence_id] = payload.to_item((sequence_id, *columns, enqueued_at), 0)
                self.enqueued_at[sequence_id] = enqueued_at
            case "span", [first, last, state, _, *columns]:
                span = selects.to_span((first, last, state, *columns))
                for i in filter(self.items.__contains__, range(first, last + 1)):
                    self.spans[i] = span.cut(i, i)
                    self.items[i] = msgspec.structs.replace(self.items[i], priority=span.priority)
            case "error", [last, _, _, first, attempt, at, peer, error]:
                for i in range(first, last + 1):
                    self._keep_error(i, ErrorRecord(attempt, to_datetime(at), error, peer))

    def _enter(self, event: LeaseEvent, span: Span) -> None:
        super()._enter(event, span)
        self.next_id = max(self.next_id, span.first + 1)
        self.enqueued_at[span.first] = to_micros(event.enqueued_at or event.timestamp)
        self.errors.pop(span.first, None)
        for error in event.errors:
            self._keep_error(span.first, error)

    def _move(self, event: LeaseEvent) -> None:
        super()._move(event)
        self.completed += event.type == EventType.COMPLETED
        if event.error is not None and event.sequence_id is not None and event.type in _FAILURES:
            attempt = self.spans[event.sequence_id].leased_attempt
            self._keep_error(event.sequence_id, ErrorRecord(attempt, event.timestamp, event.error, event.peer_id))

    def _become(self, sequence_id: int, to: Span | None) -> None:
        super()._become(sequence_id, to)
        if to is None:
            del self.enqueued_at[sequence_id]
            self.errors.pop(sequence_id, None)

    def _keep_error(self, sequence_id: int, error: ErrorRecord) -> None:
        self.errors[sequence_id] = self.errors.get(sequence_id, 0) + _digest(error)


def _digest(error: ErrorRecord) -> int:
    told = _encode((error.attempt, to_micros(error.at), error.error, error.peer_id))
    return int.from_bytes(blake2b(told, digest_size=16).digest())


def difference(queue: LeaseQueue, expected: Expected) -> str | None:
    """The first thing in the queue's tables that is not as expected, in words.

    Finished items may be forgotten. Where readers of the log are does not matter, nor who waits.
    """
    known = sorted(expected.spans)
    head = reading.head(queue._store, queue._ns)
    for start in range(0, len(known), _TOGETHER):
        for i, _ in _differing(queue, expected, head, known[start : start + _TOGETHER]):
            for _, problem in _differing(queue, expected, head, [i]):  # unless it was forgotten just then
                return f"item {i}: {problem}"
    return _stranger(queue, known) or _head_problem(queue, expected)


def _differing(queue: LeaseQueue, expected: Expected, head: Head, ids: list[int]) -> Iterator[tuple[int, str]]:
    rows = _read(queue, ids)
    for i in ids:
        if problem := _row_problem(expected, i, rows.of(i), head.exclusive):
            yield i, problem


class _Stored(NamedTuple):
    """What the tables say of one item."""

    span: Span | None
    row: Row | None
    errors: int


class _Rows(NamedTuple):
    spans: list[Span]
    items: dict[int, Row]
    errors: dict[int, list[ErrorRecord]]

    def of(self, sequence_id: int) -> _Stored:
        at = bisect_left(self.spans, sequence_id, key=lambda span: span.last)
        span = self.spans[at] if at < len(self.spans) and self.spans[at].first <= sequence_id else None
        return _Stored(
            span and span.cut(sequence_id, sequence_id),
            self.items.get(sequence_id),
            sum(map(_digest, self.errors.get(sequence_id, ()))),
        )


def _read(queue: LeaseQueue, ids: Sequence[int]) -> _Rows:
    store, ns = queue._store, queue._ns
    ranges = selects.merged([(i, i) for i in ids])
    asked = [select(store, ns, ranges) for select in (selects.overlapping, selects.items, selects.errors)]
    found = iter(store.read(*chain.from_iterable(asked)))
    spans, items, errors = ([row for _ in queries for row in next(found)] for queries in asked)
    return _Rows(
        sorted({row[0]: selects.to_span(row) for row in spans}.values(), key=lambda span: span.first),
        {row[0]: row for row in items},
        payload.errors_by_item(errors, ids),
    )


def _row_problem(expected: Expected, sequence_id: int, stored: _Stored, exclusive: str | None) -> str | None:
    told, item = expected.spans[sequence_id], expected.items[sequence_id]
    state = told.state.name.lower()
    span, row, errors = stored
    if span is None and row is None:
        if told.state not in _FORGOTTEN:
            return f"is {state} by the log, but not in the queue"
        return "is forgotten, but its errors are not" if errors else None
    if span is None or row is None:
        return f"has {'no state' if span is None else 'a state, but no row of what it is'}; it is {state} by the log"
    if span.state is not told.state:
        return f"is {span.state.name.lower()} in the queue, but {state} by its log"
    if payload.to_item(row, span.priority) != item:
        return "is another item than its log says"
    key = payload.exclusive_key(item.resource_type, item.resource_id, item.partition_key, exclusive)
    here = (errors, span.has_errors)
    compared = {
        "came in at another time": (row[7], expected.enqueued_at[sequence_id]),
        "has another attempt or token": (_token(span), _token(told)),
        "has another result": (_decoded(span.result), _decoded(told.result)),
        "has a lease that ends at another time": (span.expires_at, told.expires_at),
        "has another owner": (span.owner, told.owner),
        "is available, or stands as it does, since another time": (span.available_at, told.available_at),
        "has other errors": (here, (expected.errors.get(sequence_id, 0), told.has_errors)),
        "has another key": (span.key, key if told.state in _WAITING else None),
    }
    return next((f"{what} than its log says" for what, (one, other) in compared.items() if one != other), None)


def _token(span: Span) -> tuple[object, ...]:
    return span.attempt, span.lease_id, span.fence, span.ended


def _decoded(result: bytes | None) -> object:
    return None if result is None else msgspec.json.decode(result)


def _stranger(queue: LeaseQueue, known: list[int]) -> str | None:
    """An item that is mentioned somewhere, but that the log does not know of, or knows to be purged."""
    for what, sql in _MENTIONED.items():
        after = -(2**63)
        while rows := queue._store.read(Query(sql, (queue._ns, after, _TOGETHER)))[0]:
            for first, last in rows:
                if (unknown := _missing(known, first, last)) is not None:
                    return f"item {unknown}: has {what} in the queue, but is not there by its log"
            after = rows[-1][1] if what == "errors" else rows[-1][0]
    return None


def _missing(known: list[int], first: int, last: int) -> int | None:
    """The first of the ids that is not known. All of them are if as many known ones lie between the two."""
    at = bisect_left(known, first)
    if at + last - first < len(known) and known[at + last - first] == last:
        return None
    while at < len(known) and known[at] == first:
        at, first = at + 1, first + 1
    return first


def _head_problem(queue: LeaseQueue, expected: Expected) -> str | None:
    store, ns = queue._store, queue._ns
    [[blocked]], lanes, [[due]], [[expiry]] = store.read(
        *(Query(sql, (ns,)) for sql in (_BLOCKED, _LANES, _DUE, _EXPIRY))
    )
    head = reading.head(store, ns)
    if head.number != expected.number:
        return None  # the counts are of another moment
    counted = {
        "pending": (head.pending, expected.pending),
        "active": (head.active, expected.active),
        "dead": (head.dead, sum(span.state is State.DEAD for span in expected.spans.values())),
        "completed": (head.completed, expected.completed),
        "next id": (head.next_id, expected.next_id),
        "backpressure": (bool(head.backpressure), expected.backpressure),
    }
    for what, (one, other) in counted.items():
        if one != other:
            return f"the queue's head says {what} {one}; its log says {other}"
    if blocked is not None or lanes:
        return f"item {lanes[0][0] if blocked is None else blocked}: would never be leased, or together with another"
    for what, first, looked in (("delayed", due, head.next_due), ("leased", expiry, head.next_expiry)):
        if first is not None and (looked is None or looked > first):
            return f"the queue's head would overlook the first {what} item when its time comes"
    return None
