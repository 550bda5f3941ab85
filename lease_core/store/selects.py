"""The reads that several operations share, as queries."""

from __future__ import annotations

from collections.abc import Sequence

from lease_core.machine import Ended, Span, State
from lease_core.store.base import Query, Row, Store

Range = tuple[int, int]

SPAN_COLUMNS = ", ".join(Span.__struct_fields__)
_SPAN = ", ".join(f"s.{column}" for column in Span.__struct_fields__)
NAME_COLUMNS = "id, resource_type, resource_id, partition_key"
ITEM_COLUMNS = f"{NAME_COLUMNS}, request_id, extra, body, enqueued_at"
ERROR_COLUMNS = "first, last, attempt, at, peer, error"

LONGEST_ERROR_SPAN = 1_000
"""No error row covers more items than this, so that an item's errors are found in a bounded part of the index."""

_STATES = (None, *State)
_ENDS = (None, *Ended)


def to_span(row: Row) -> Span:
    (
        first,
        last,
        state,
        priority,
        available_at,
        attempt,
        lease_id,
        owner,
        fence,
        expires_at,
        ended,
        key,
        result,
        errors,
    ) = row
    return Span(
        first,
        last,
        _STATES[state],
        priority,
        available_at,
        attempt,
        lease_id,
        owner,
        fence,
        expires_at,
        ended and _ENDS[ended],
        key,
        result,
        bool(errors),
    )


def overlapping(store: Store, ns: int, ranges: Sequence[Range]) -> list[Query]:
    """The spans that any of the id ranges touches. Spans never overlap, so the one before ``lo`` is looked up first."""
    one = (
        f"SELECT {_SPAN} FROM omnirelay_span s WHERE s.ns = ? AND s.first <= {{hi}} AND s.first >= coalesce("
        "(SELECT max(b.first) FROM omnirelay_span b WHERE b.ns = ? AND b.first <= {lo}), {lo})"
    )
    if len(ranges) > 1 and store.lateral:
        sql = (
            "SELECT t.* FROM unnest(?::bigint[], ?::bigint[]) AS r(lo, hi) CROSS JOIN LATERAL "
            f"({one.format(lo='r.lo', hi='r.hi')}) t"
        )
        return [Query(sql, (*_columns(ranges), ns, ns))]
    sql = one.format(lo="?", hi="?")
    return [Query(sql, (ns, hi, ns, lo, lo)) for lo, hi in ranges]


def items(store: Store, ns: int, ranges: Sequence[Range], columns: str = ITEM_COLUMNS) -> list[Query]:
    """The items of the id ranges: whole, or with ``NAME_COLUMNS`` their names."""
    if len(ranges) > 1 and store.lateral:
        sql = (
            f"SELECT t.* FROM unnest(?::bigint[], ?::bigint[]) AS r(lo, hi) CROSS JOIN LATERAL "
            f"(SELECT {columns} FROM omnirelay_item WHERE ns = ? AND id BETWEEN r.lo AND r.hi) t"
        )
        return [Query(sql, (*_columns(ranges), ns))]
    sql = f"SELECT {columns} FROM omnirelay_item WHERE ns = ? AND id BETWEEN ? AND ? ORDER BY id"
    return [Query(sql, (ns, lo, hi)) for lo, hi in ranges]


def errors(ns: int, ranges: Sequence[Range]) -> list[Query]:
    """The error rows that concern any of the id ranges, oldest first."""
    sql = (
        f"SELECT {ERROR_COLUMNS} FROM omnirelay_error WHERE ns = ? AND last >= ? AND last <= ? AND first <= ? "
        "ORDER BY number"
    )
    return [Query(sql, (ns, lo, hi + LONGEST_ERROR_SPAN - 1, hi)) for lo, hi in ranges]


def _columns(ranges: Sequence[Range]) -> tuple[list[int], list[int]]:
    return [lo for lo, _ in ranges], [hi for _, hi in ranges]


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Sorted ranges, joined where they touch or overlap."""
    joined: list[Range] = []
    for lo, hi in ranges:
        if joined and lo <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        else:
            joined.append((lo, hi))
    return joined
