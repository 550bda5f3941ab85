"""The reads that several operations share, as queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lease_core.machine import Ended, Span, State
from lease_core.store.base import Query, Row, Store

Range = tuple[int, int]
Fetch = Callable[..., list[list[Row]]]

SPAN_COLUMNS = ", ".join(Span.__struct_fields__)
NAME_COLUMNS = "id, resource_type, resource_id, partition_key"
ITEM_COLUMNS = f"{NAME_COLUMNS}, request_id, extra, body, enqueued_at"
BODILESS_COLUMNS = f"{NAME_COLUMNS}, request_id, extra, NULL, enqueued_at"
ERROR_COLUMNS = "first, last, number, nth, attempt, at, peer, error"

LONGEST_ERROR_SPAN = 1_000
"""No error row covers more items than this, so that an item's errors are found in a bounded part of the index."""

_STATES = (None, *State)
_ENDS = (None, *Ended)


def to_span(row: Row) -> Span:
    first, last, state, *middle, ended, key, result, has_errors = row
    fields: list[Any] = [first, last, _STATES[state], *middle, ended and _ENDS[ended], key, result, bool(has_errors)]
    return Span(*fields)


_OVERLAPPING = (
    f"SELECT * FROM (SELECT {SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND first <= {{lo}} "
    f"ORDER BY first DESC LIMIT 1) b "
    f"UNION ALL SELECT {SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND first > {{lo}} AND first <= {{hi}}"
)
_RANGES = "SELECT t.* FROM unnest(?::bigint[], ?::bigint[]) AS r(lo, hi) CROSS JOIN LATERAL ({query}) t"


def overlapping(store: Store, ns: int, ranges: Sequence[Range]) -> list[Query]:
    """The spans that any of the id ranges touches, and at most one before each: spans never overlap."""
    if len(ranges) > 1 and store.lateral:
        sql = _RANGES.format(query=_OVERLAPPING.format(lo="r.lo", hi="r.hi"))
        return [Query(sql, (*_columns(store, ranges), ns, ns))]
    sql = _OVERLAPPING.format(lo="?", hi="?")
    return [Query(sql, (ns, lo, ns, lo, hi)) for lo, hi in ranges]


def items(store: Store, ns: int, ranges: Sequence[Range], columns: str = ITEM_COLUMNS) -> list[Query]:
    """The items of the id ranges: whole, without their bodies, or with ``NAME_COLUMNS`` their names only."""
    one = f"SELECT {columns} FROM omnirelay_item WHERE ns = ? AND id BETWEEN {{lo}} AND {{hi}}"
    if len(ranges) > 1 and store.lateral:
        return [Query(_RANGES.format(query=one.format(lo="r.lo", hi="r.hi")), (*_columns(store, ranges), ns))]
    sql = one.format(lo="?", hi="?") + " ORDER BY id"
    return [Query(sql, (ns, lo, hi)) for lo, hi in ranges]


def errors(store: Store, ns: int, ranges: Sequence[Range]) -> list[Query]:
    """The error rows that concern any of the id ranges; one that concerns several may come several times."""
    one = (
        f"SELECT {ERROR_COLUMNS} FROM omnirelay_error WHERE ns = ? AND last >= {{lo}} "
        f"AND last <= {{hi}} + {LONGEST_ERROR_SPAN - 1} AND first <= {{hi}}"
    )
    if len(ranges) > 1 and store.lateral:
        return [Query(_RANGES.format(query=one.format(lo="r.lo", hi="r.hi")), (*_columns(store, ranges), ns))]
    return [Query(one.format(lo="?", hi="?"), (ns, lo, hi, hi)) for lo, hi in ranges]


def _columns(store: Store, ranges: Sequence[Range]) -> tuple[Any, Any]:
    return store.pack([lo for lo, _ in ranges]), store.pack([hi for _, hi in ranges])


def merged(ranges: Sequence[Range]) -> list[Range]:
    """Sorted ranges, joined where they touch or overlap."""
    joined: list[Range] = []
    for lo, hi in ranges:
        if joined and lo <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        else:
            joined.append((lo, hi))
    return joined


def without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    """What is left of a range when others, in order and disjoint, are taken out of it."""
    lo, hi = whole
    left = []
    for first, last in holes:
        if last < lo or first > hi:
            continue
        if lo < first:
            left.append((lo, first - 1))
        lo = last + 1
    return [*left, (lo, hi)] if lo <= hi else left


_IN_LINE = "FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready = 1 ORDER BY priority DESC, available_at, first"
_READY = f"{_IN_LINE} LIMIT ?"
_READY_SPANS = f"SELECT {SPAN_COLUMNS} {_READY}"
_FIRST_OF_SPAN = ", ".join(f"CASE WHEN i.id = s.first THEN s.{column} END" for column in Span.__struct_fields__)
_READY_WITH_ITEMS = (
    f"SELECT {_FIRST_OF_SPAN}, i.* FROM (SELECT ns, {SPAN_COLUMNS} {_READY}) s CROSS JOIN LATERAL "
    f"(SELECT {ITEM_COLUMNS} FROM omnirelay_item WHERE ns = s.ns AND id BETWEEN s.first AND s.last "
    "ORDER BY id LIMIT ?) i LIMIT ?"
)
_WIDTH = len(Span.__struct_fields__)


def ready(fetch: Fetch, store: Store, ns: int, limit: int) -> tuple[list[Row], list[Row]]:
    """The spans that come first in line, and the items of as many of them as hold ``limit``.

    One statement where the database can: each row is an item, and the first of a span carries the span.
    """
    if store.lateral:
        [rows] = fetch(Query(_READY_WITH_ITEMS, (ns, limit, limit, limit)))
        return [row[:_WIDTH] for row in rows if row[0] is not None], [row[_WIDTH:] for row in rows]
    [spans] = fetch(Query(_READY_SPANS, (ns, limit)))
    ranges: list[Range] = []
    for first, last, *_ in spans:
        if limit <= 0:
            break
        ranges.append((first, min(last, first + limit - 1)))
        limit -= ranges[-1][1] - first + 1
    found = fetch(*items(store, ns, adjoining(ranges)))
    return spans, [row for rows in found for row in rows]


_OF_SPAN = ", ".join(f"s.{column}" for column in Span.__struct_fields__)
_OF_ITEM = ", ".join(f"i.{column}" for column in ITEM_COLUMNS.split(", "))
_READY_OF_PARTITION = (
    f"SELECT {_OF_SPAN}, {_OF_ITEM} FROM omnirelay_span s "
    "JOIN omnirelay_item i ON i.ns = s.ns AND i.id BETWEEN s.first AND s.last "
    "WHERE s.ns = ? AND s.state = 1 AND s.ready = 1 AND i.partition_key = ? "
    "ORDER BY s.priority DESC, s.available_at, s.first, i.id LIMIT ?"
)
_READY_OF_PARTITION_LATERAL = (
    f"SELECT {_OF_SPAN}, i.* FROM (SELECT ns, {SPAN_COLUMNS} {_IN_LINE}) s CROSS JOIN LATERAL "
    f"(SELECT {ITEM_COLUMNS} FROM omnirelay_item WHERE ns = s.ns AND id BETWEEN s.first AND s.last "
    "AND partition_key = ? ORDER BY id) i LIMIT ?"
)


def ready_of_partition(
    fetch: Fetch, store: Store, ns: int, partition_key: str, limit: int
) -> tuple[list[Row], list[Row]]:
    """The items of a partition that come first in line, and the spans that they are in.

    A span holds neighbours of any partition, so this looks at whatever stands in line before them as well.
    """
    sql = _READY_OF_PARTITION_LATERAL if store.lateral else _READY_OF_PARTITION
    [rows] = fetch(Query(sql, (ns, partition_key, limit)))
    spans = {row[0]: row[:_WIDTH] for row in rows}
    return list(spans.values()), [row[_WIDTH:] for row in rows]


def adjoining(ranges: list[Range]) -> list[Range]:
    """The ranges, joined where one goes on with the next."""
    joined: list[Range] = []
    for lo, hi in ranges:
        if joined and joined[-1][1] == lo - 1:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return joined
