"""What holders of leases say: still at it, done, failed, handing back. One path for all four."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from lease_core import payload
from lease_core.log import Name
from lease_core.machine import (
    BATCH,
    Claim,
    Complete,
    Fail,
    Heartbeat,
    Moved,
    Outcome,
    Refused,
    Release,
    Span,
    decide,
    replace,
)
from lease_core.model import AckResult, LeaseToken, Refusal
from lease_core.store import selects
from lease_core.store.base import Query
from lease_core.unit import Unit

Ack = Heartbeat | Complete | Fail | Release
MakeAck = Callable[[Claim, bytes | None, int], Ack]
"""Makes the command for a claim, with its result and the time now."""


class Group(NamedTuple):
    """Tokens that are the same but for consecutive ids and fences, and share a result."""

    first: int
    claim: Claim
    result: bytes | None
    positions: list[int]


def group(tokens: Sequence[LeaseToken], results: Sequence[bytes | None]) -> list[Group]:
    groups: list[Group] = []
    order = sorted(range(len(tokens)), key=lambda position: tokens[position].sequence_id)
    for position in order:
        token, result = tokens[position], results[position]
        if groups:
            first, claim, shared, positions = groups[-1]
            offset = len(positions)
            if (
                token.sequence_id == first + offset
                and token.lease_id == claim.lease_id
                and token.attempt == claim.attempt
                and token.fence == claim.fence + offset
                and result == shared
            ):
                positions.append(position)
                continue
        groups.append(Group(token.sequence_id, Claim(token.attempt, token.lease_id, token.fence), result, [position]))
    return groups


def acknowledge(
    unit: Unit,
    tokens: Sequence[LeaseToken],
    results: Sequence[bytes | None],
    make: MakeAck,
    *,
    named: bool = True,
    atomic: bool = False,
    error: str | None = None,
    principal: str | None = None,
) -> AckResult:
    """Apply one command to every token's item. Refused tokens change nothing; with ``atomic`` none does then."""
    groups = group(tokens, results)
    names = _load(unit, groups, named)
    refused: dict[int, Refused] = {}
    if atomic:
        for first, positions, lo, hi, _, outcome in _decisions(unit, groups, make):
            if isinstance(outcome, Refused):
                refused.update((positions[i - first], outcome) for i in range(lo, hi + 1))
        if refused:
            others = Refused(BATCH, "another token of this atomic call was refused, so nothing was done")
            everything = tuple(_refusal(token, refused.get(i, others)) for i, token in enumerate(tokens))
            return AckResult((), everything, unit.head.pending, unit.head.active)
    for first, positions, lo, hi, span, outcome in _decisions(unit, groups, make):
        if isinstance(outcome, Refused):
            refused.update((positions[i - first], outcome) for i in range(lo, hi + 1))
        elif isinstance(outcome, Moved):
            assert span is not None
            unit.apply(unit.carve(span, lo, hi), outcome, names, error=error, principal=principal)
    accepted = tuple(tokens) if not refused else tuple(t for i, t in enumerate(tokens) if i not in refused)
    refusals = tuple(_refusal(tokens[i], refused[i]) for i in sorted(refused))
    return AckResult(accepted, refusals, unit.head.pending, unit.head.active)


def _decisions(
    unit: Unit, groups: list[Group], make: MakeAck
) -> Iterator[tuple[int, list[int], int, int, Span | None, Outcome]]:
    """What the command would do to each part of each group, as things stand when that part is reached."""
    for first, claim, result, positions in groups:
        for lo, hi, span in list(unit.parts(first, first + len(positions) - 1)):
            shifted = replace(claim, fence=claim.fence + lo - first) if lo != first else claim
            outcome = decide(span and span.cut(lo, hi), make(shifted, result, unit.now), unit.now)
            yield first, positions, lo, hi, span, outcome


def _refusal(token: LeaseToken, refused: Refused) -> Refusal:
    return Refusal(token, refused.code, refused.reason)


def _load(unit: Unit, groups: list[Group], named: bool) -> Callable[[int], Name] | None:
    ns = unit.transaction.ns
    spanned = sorted((first, first + len(positions) - 1) for first, _, _, positions in groups)
    ranges = selects.merged(spanned)
    spans = selects.overlapping(unit.store, ns, ranges)
    items = selects.items(unit.store, ns, ranges, selects.NAME_COLUMNS) if named else []
    rows = unit.fetch(*spans, *items)
    unit.load(chain.from_iterable(rows[: len(spans)]))
    if not named:
        return None
    found = {row[0]: payload.to_name(row) for row in chain.from_iterable(rows[len(spans) :])}
    return found.__getitem__


def release_owner(unit: Unit, peer: str, limit: int, principal: str | None) -> tuple[int, bool]:
    """Hand back up to ``limit`` spans that ``peer`` holds. Gives how many items, and whether there may be more."""
    unit.fetch()
    sql = (
        f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span "
        "WHERE ns = ? AND state = 2 AND expires_at > ? AND owner = ? ORDER BY expires_at LIMIT ?"
    )
    [rows] = unit.fetch(Query(sql, (unit.ns, unit.now, peer, limit)))
    spans = unit.load(rows)
    ranges = [(span.first, span.last) for span in spans]
    found = unit.fetch(*selects.items(unit.store, unit.ns, ranges, selects.NAME_COLUMNS)) if ranges else []
    names = {row[0]: payload.to_name(row) for row in chain.from_iterable(found)}
    for span in spans:
        outcome = decide(span, Release(_claim(span)), unit.now)
        assert isinstance(outcome, Moved)
        unit.apply(span, outcome, names.__getitem__, principal=principal)
    return sum(map(len, spans)), len(rows) == limit


def _claim(span: Span) -> Claim:
    assert span.lease_id is not None
    return Claim(span.attempt, span.lease_id, span.fence)
