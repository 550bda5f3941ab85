"""Handing out work: take over what expired, then lease the first of what is ready."""

from __future__ import annotations

import uuid
from itertools import chain

import msgspec

from lease_core import payload
from lease_core.machine import Expire, Grant, Moved, Retry, Span, State, decide
from lease_core.model import Lease, LeaseToken, to_datetime
from lease_core.store import selects
from lease_core.store.base import Query, Row
from lease_core.unit import Unit

EXPIRED_AT_ONCE = 200
"""How many expired spans one transaction takes over at the most, so that no single call pays for all."""

_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_PROMOTE = (
    "UPDATE omnirelay_span SET ready = 1 WHERE ns = ? AND first IN (SELECT first FROM omnirelay_span "
    "WHERE ns = ? AND state = 1 AND ready = 2 AND available_at <= {now} ORDER BY available_at LIMIT 500)"
)
_EXPIRED = (
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 2 AND expires_at <= {{now}} "
    f"ORDER BY expires_at LIMIT {EXPIRED_AT_ONCE}"
)
_READY = (
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready = 1 "
    "ORDER BY priority DESC, available_at, first LIMIT ?"
)
_READY_ITEMS = (
    f"SELECT i.* FROM (SELECT ns, first, last FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready = 1 "
    "ORDER BY priority DESC, available_at, first LIMIT ?) s CROSS JOIN LATERAL "
    f"(SELECT {selects.ITEM_COLUMNS} FROM omnirelay_item WHERE ns = s.ns AND id BETWEEN s.first "
    "AND least(s.last, s.first + ? - 1) ORDER BY id LIMIT ?) i LIMIT ?"
)


class Due(msgspec.Struct):
    """What a lease call found: the leases or, if there were none, when looking again could pay."""

    leases: list[Lease]
    next_at: int | None = None
    now: int = 0


def grant(unit: Unit, peer: str, limit: int, duration: int, retry: Retry, principal: str | None, wait: int) -> Due:
    """Lease up to ``limit`` items to ``peer``. ``wait``: how long the caller means to wait if there are none."""
    ns = unit.transaction.ns
    rows = _look(unit, ns, limit)
    expired = take_over(unit, rows["expired"], retry, principal)
    candidates = unit.load(rows["ready"]) + [span for span in expired if span.state is State.PENDING]
    candidates.sort(key=lambda span: (-span.priority, span.available_at, span.first))
    taken = _first_of(unit, candidates, limit)
    if not taken:
        return _nothing_to_lease(unit, wait)
    stored = {row[0]: row for row in rows["items"]}
    missing = [(s.first, s.last) for s in taken if s.first not in stored or s.last not in stored]
    if missing:
        for found in unit.fetch(*selects.items(unit.store, ns, missing)):
            stored.update((row[0], row) for row in found)
    errors = _last_errors(unit, taken)
    lease_id = uuid.uuid4().hex
    expires_at = unit.now + duration
    leases: list[Lease] = []
    for span in taken:
        outcome = decide(span, Grant(lease_id, peer, unit.head.number + 1, expires_at), unit.now)
        assert isinstance(outcome, Moved), outcome
        granted = unit.apply(span, outcome, lambda i: payload.to_name(stored[i]), principal=principal)
        assert granted is not None
        leases.extend(_leases(granted, stored, errors))
    return Due(leases)


def _look(unit: Unit, ns: int, limit: int) -> dict[str, list[Row]]:
    """Everything a grant needs to see, in one round trip where the database can."""
    store = unit.store
    if not store.lateral:
        unit.fetch()
        unit.fetch(Query(_PROMOTE.format(now="?"), (ns, ns, unit.now)))
        [expired, ready] = unit.fetch(expired_by(ns, unit.now), Query(_READY, (ns, limit)))
        spans = [(row[0], min(row[1], row[0] + limit - 1)) for row in ready]
        items = chain.from_iterable(unit.fetch(*selects.items(store, ns, _enough(spans, limit))))
        return {"expired": expired, "ready": ready, "items": list(items)}
    fixed = () if store.clock is None else (store.read_now(),)
    now = "?::bigint" if fixed else _NOW
    [_, expired, ready, found] = unit.fetch(
        Query(_PROMOTE.format(now=now) + " RETURNING 1", (ns, ns, *fixed)),
        Query(_EXPIRED.format(now=now), (ns, *fixed)),
        Query(_READY, (ns, limit)),
        Query(_READY_ITEMS, (ns, limit, limit, limit, limit)),
    )
    return {"expired": expired, "ready": ready, "items": found}


def _enough(ranges: list[selects.Range], limit: int) -> list[selects.Range]:
    """As many of the ranges as hold ``limit`` items, joined where they touch."""
    chosen: list[selects.Range] = []
    for lo, hi in ranges:
        if limit <= 0:
            break
        limit -= hi - lo + 1
        if chosen and chosen[-1][1] == lo - 1:
            chosen[-1] = (chosen[-1][0], hi)
        else:
            chosen.append((lo, hi))
    return chosen


def expired_by(ns: int, now: int) -> Query:
    """Leased spans that have run out, the longest overdue first."""
    return Query(_EXPIRED.format(now="?"), (ns, now))


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
    ranges = [(span.first, span.last) for span in spans if span.has_errors]
    if not ranges:
        return {}
    latest: dict[int, str] = {}
    for (lo, hi), rows in zip(ranges, unit.fetch(*selects.errors(unit.ns, ranges)), strict=True):
        for first, last, _, _, _, error in rows:
            latest.update((i, error) for i in range(max(first, lo), min(last, hi) + 1))
    for first, last, message in unit.unsaved_errors():
        latest.update((i, message) for i in range(first, last + 1))
    return latest


def _leases(span: Span, stored: dict[int, Row], errors: dict[int, str]) -> list[Lease]:
    assert span.lease_id is not None
    assert span.owner is not None
    assert span.expires_at is not None
    granted_at, expires_at = to_datetime(span.available_at), to_datetime(span.expires_at)
    leases = []
    for offset in range(len(span)):
        row = stored[span.first + offset]
        token = LeaseToken(span.first + offset, span.attempt, span.lease_id, span.fence + offset)
        leases.append(
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
    return leases


def _nothing_to_lease(unit: Unit, wait: int) -> Due:
    """Find out when a delay or a lease will end, and leave a note for whoever brings work before that."""
    if not wait:
        return Due([])
    [[delayed], [expiring]] = unit.fetch(
        Query(
            "SELECT min(available_at) FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready = 2",
            (unit.ns,),
        ),
        Query("SELECT min(expires_at) FROM omnirelay_span WHERE ns = ? AND state = 2", (unit.ns,)),
    )
    if unit.store.registers_waiters and unit.head.lease_wait_until < unit.now + wait:
        unit.head.lease_wait_until = unit.now + wait
        unit.touch_head()
    times = [row[0] for row in (delayed, expiring) if row[0] is not None]
    return Due([], min(times) if times else None, unit.now)
