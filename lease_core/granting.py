"""Handing out work: take over what expired, then lease the first of what is ready."""

from __future__ import annotations

import uuid
from itertools import chain

import msgspec

from lease_core import payload
from lease_core.machine import Expire, Grant, Moved, Retry, Span, State, decide, replace
from lease_core.model import Lease, LeaseToken, to_datetime
from lease_core.store import selects
from lease_core.store.base import Query, Row
from lease_core.unit import Unit

EXPIRED_AT_ONCE = 200
PROMOTED_AT_ONCE = 10_000
"""How many spans one transaction takes over, or makes ready, at the most, so that no single call pays for all."""

_PROMOTE = (
    "UPDATE omnirelay_span SET ready = 1 WHERE ns = ? AND first IN (SELECT first FROM omnirelay_span "
    "WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 2 AND available_at <= ? ORDER BY available_at LIMIT ?) "
    "RETURNING 1"
)
_EXPIRED = (
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 2 AND expires_at <= ? "
    "ORDER BY expires_at, first LIMIT ?"
)
_NEXT_DUE = "SELECT min(available_at) FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 2"
_NEXT_EXPIRY = "SELECT min(expires_at) FROM omnirelay_span WHERE ns = ? AND state = 2 AND expires_at > ?"


class Granted(msgspec.Struct):
    """A span that was leased, with what is needed to tell the caller of its items."""

    span: Span
    stored: dict[int, Row]
    errors: dict[int, str]


class Due(msgspec.Struct):
    """What a lease call found: what was granted or, if nothing was, when looking again could pay."""

    granted: list[Granted]
    next_at: int | None = None
    now: int = 0
    look_again: bool = False


def grant(
    unit: Unit,
    peer: str,
    limit: int,
    duration: int,
    retry: Retry,
    principal: str | None,
    wait: int,
    partition_key: str | None = None,
) -> Due:
    """Lease up to ``limit`` items to ``peer``, of one partition if it is given.

    ``wait``: how long the caller means to wait if there are none.
    """
    ns = unit.transaction.ns
    spans, items = _in_line(unit, limit, partition_key)
    expired: list[Span] = []
    if _is_past(unit.head.next_due, unit.now) or _is_past(unit.head.next_expiry, unit.now):
        expired = _catch_up(unit, retry, principal)
        spans, items = _in_line(unit, limit, partition_key)
    if partition_key is None:
        candidates = [span for span in unit.load(spans) + expired if span.state is State.PENDING]
        candidates.sort(key=lambda span: (-span.priority, span.available_at, span.first))
        taken = _first_of(unit, candidates, limit)
    else:
        # what has just been taken over has its turn in the next transaction, which can tell its partition
        unit.load(spans)
        taken = _just(unit, [row[0] for row in items])
    if not taken:
        # a lease that was taken over may have made way for another item of its key, or for more that had run out
        return Due([], look_again=True) if expired else _nothing_to_lease(unit, wait)
    stored = {row[0]: row for row in items}
    missing = [(s.first, s.last) for s in taken if s.first not in stored or s.last not in stored]
    if missing:
        for found in unit.fetch(*selects.items(unit.store, ns, missing)):
            stored.update((row[0], row) for row in found)
    errors = _last_errors(unit, taken)
    lease_id = uuid.uuid4().hex
    expires_at = unit.now + duration
    granted: list[Granted] = []
    for span in taken:
        command = Grant(lease_id, peer, unit.head.number + 1, expires_at)
        # what was ready once stays so, even if the clock has stepped back since
        outcome = decide(replace(span, available_at=min(span.available_at, unit.now)), command, unit.now)
        assert isinstance(outcome, Moved), outcome
        leased = unit.apply(span, outcome, lambda i: payload.to_name(stored[i]), principal=principal)
        assert leased is not None
        granted.append(Granted(leased, stored, errors))
    return Due(granted)


def _in_line(unit: Unit, limit: int, partition_key: str | None) -> tuple[list[Row], list[Row]]:
    if partition_key is None:
        return selects.ready(unit.fetch, unit.store, unit.transaction.ns, limit)
    return selects.ready_of_partition(unit.fetch, unit.store, unit.transaction.ns, partition_key, limit)


def _just(unit: Unit, ids: list[int]) -> list[Span]:
    """Exactly these items, cut out of the spans they are in, in the order given."""
    taken: list[Span] = []
    for lo, hi in selects.adjoining([(i, i) for i in ids]):
        for first, last, span in list(unit.parts(lo, hi)):
            if span is not None and span.state is State.PENDING:
                taken.append(unit.carve(span, first, last))
    return taken


def _is_past(bound: int | None, now: int) -> bool:
    return bound is not None and bound <= now


def _catch_up(unit: Unit, retry: Retry, principal: str | None) -> list[Span]:
    """Let delayed items become ready and end leases that have run out, up to a number; then see what comes next."""
    ns, now = unit.ns, unit.now
    [promoted, [due], rows, [expiry]] = unit.fetch(
        Query(_PROMOTE, (ns, ns, now, PROMOTED_AT_ONCE)),
        Query(_NEXT_DUE, (ns,)),
        expired_by(ns, now),
        Query(_NEXT_EXPIRY, (ns, now)),
    )
    if len(promoted) < PROMOTED_AT_ONCE:
        unit.head.next_due = due[0]
    if len(rows) < EXPIRED_AT_ONCE:
        unit.head.next_expiry = expiry[0]
    unit.touch_head()
    return take_over(unit, rows, retry, principal)


def expired_by(ns: int, now: int) -> Query:
    """Leased spans that have run out, the longest overdue first."""
    return Query(_EXPIRED, (ns, now, EXPIRED_AT_ONCE))


def take_over(unit: Unit, rows: list[Row], retry: Retry, principal: str | None) -> list[Span]:
    """End leases that have run out. Gives the spans as they are afterwards: pending again, or dead."""
    spans = unit.load(rows)
    if not spans:
        return []
    ranges = selects.merged(sorted((span.first, span.last) for span in spans))
    found = unit.fetch(*selects.items(unit.store, unit.ns, ranges, selects.NAME_COLUMNS))
    names = {row[0]: payload.to_name(row) for row in chain.from_iterable(found)}
    ended = []
    for span in spans:
        outcome = decide(span, Expire(retry), unit.now)
        if isinstance(outcome, Moved):
            error = f"lease expired: no heartbeat from {span.owner} in time"
            to = unit.apply(span, outcome, names.__getitem__, principal=principal, error=error)
            assert to is not None
            ended.append(to)
    return ended


def _first_of(unit: Unit, candidates: list[Span], limit: int) -> list[Span]:
    taken = []
    for span in candidates:
        if limit <= 0:
            break
        part = unit.carve(span, span.first, min(span.last, span.first + limit - 1))
        limit -= len(part)
        taken.append(part)
    return taken


def _last_errors(unit: Unit, spans: list[Span]) -> dict[int, str]:
    """The latest error of each item that has one."""
    troubled = [span for span in spans if span.has_errors]
    if not troubled:
        return {}
    ranges = selects.merged(sorted((span.first, span.last) for span in troubled))
    found = chain.from_iterable(unit.fetch(*selects.errors(unit.store, unit.ns, ranges)))
    ids = [i for lo, hi in ranges for i in range(lo, hi + 1)]
    latest = {i: records[-1].error for i, records in payload.errors_by_item(found, ids).items()}
    for first, last, message in unit.unsaved_errors():
        latest.update((i, message) for i in range(first, last + 1))
    return latest


def leases(granted: Granted) -> list[Lease]:
    """The leases of one grant. Made after the commit: other writers need not wait for it."""
    span, stored, errors = granted.span, granted.stored, granted.errors
    assert span.lease_id is not None
    assert span.owner is not None
    assert span.expires_at is not None
    granted_at, expires_at = to_datetime(span.available_at), to_datetime(span.expires_at)
    made = []
    for offset in range(len(span)):
        row = stored[span.first + offset]
        token = LeaseToken(span.first + offset, span.attempt, span.lease_id, span.fence + offset)
        made.append(
            Lease(
                payload.to_item(row, span.priority),
                token,
                span.owner,
                granted_at,
                expires_at,
                to_datetime(row[7]),
                errors.get(span.first + offset),
            )
        )
    return made


def _nothing_to_lease(unit: Unit, wait: int) -> Due:
    """Find out when a delay or a lease will end, and leave a note for whoever brings work before that."""
    if not wait:
        return Due([])
    [[delayed], [expiring]] = unit.fetch(Query(_NEXT_DUE, (unit.ns,)), Query(_NEXT_EXPIRY, (unit.ns, unit.now)))
    if unit.store.registers_waiters and unit.head.lease_wait_until < unit.now + wait:
        unit.head.lease_wait_until = unit.now + wait
        unit.touch_head()
    times = [row[0] for row in (delayed, expiring) if row[0] is not None]
    return Due([], min(times) if times else None, unit.now)
