"""Forgetting, in small steps: finished items after their retention, events that no reader needs."""

from __future__ import annotations

from lease_core.errors import EventsPruned, InvalidInput
from lease_core.leaving import forget
from lease_core.machine import Span
from lease_core.store import selects
from lease_core.store.base import Query
from lease_core.unit import Unit

ITEMS_AT_ONCE = 1_000
_LOG_ROWS_AT_ONCE = 500

_FINISHED = (
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state IN (3, 5) AND available_at < ? "
    "ORDER BY available_at LIMIT 100"
)


def forget_finished(unit: Unit, retention: int) -> tuple[int, bool]:
    """Forget some items that were completed or drained long enough ago. Gives how many, and whether there are more."""
    unit.fetch()
    [rows] = unit.fetch(Query(_FINISHED, (unit.ns, unit.now - retention)))
    left = ITEMS_AT_ONCE
    dropped: list[Span] = []
    for span in unit.load(rows):
        if left <= 0:
            break
        part = unit.carve(span, span.first, min(span.last, span.first + left - 1))
        unit.drop(part)
        dropped.append(part)
        left -= len(part)
    forget(unit, dropped)
    forgotten = sum(map(len, dropped))
    return forgotten, forgotten >= ITEMS_AT_ONCE or len(rows) == 100


def prune_log(unit: Unit, before: int | None, older_than: int | None) -> tuple[int, bool]:
    """Delete some log rows that end below number ``before`` and are older than ``older_than`` microseconds.

    A bound that is None holds nothing back. Stops at what the slowest registered reader has yet to read. Gives the
    number pruned up to, and whether to go on.
    """
    unit.fetch()
    [[[slowest]], rows] = unit.fetch(
        Query("SELECT min(cursor) FROM omnirelay_reader WHERE ns = ?", (unit.ns,)),
        Query(
            "SELECT last, at FROM omnirelay_log WHERE ns = ? ORDER BY last LIMIT ?",
            (unit.ns, _LOG_ROWS_AT_ONCE),
        ),
    )
    upto = unit.head.pruned
    for last, at in rows:
        if (
            (before is not None and last >= before)
            or (older_than is not None and at > unit.now - older_than)
            or (slowest is not None and last > slowest)
        ):
            break
        upto = last
    more = bool(rows) and upto == rows[-1][0] and len(rows) == _LOG_ROWS_AT_ONCE
    if upto > unit.head.pruned:
        unit.transaction.write("DELETE FROM omnirelay_log WHERE ns = ? AND last <= ?", (unit.ns, upto))
        unit.head.pruned = upto
        unit.touch_head()
    return upto, more


def register_reader(unit: Unit, name: str, after: int) -> int:
    unit.fetch()
    [rows] = unit.fetch(Query("SELECT cursor FROM omnirelay_reader WHERE ns = ? AND name = ?", (unit.ns, name)))
    if rows:
        return int(rows[0][0])
    if after > unit.head.number:
        raise InvalidInput("after", f"the log ends at {unit.head.number}")
    if after < unit.head.pruned:
        raise EventsPruned(after, unit.head.pruned + 1)
    unit.transaction.write(
        "INSERT INTO omnirelay_reader (ns, name, cursor, updated_at) VALUES (?, ?, ?, ?)",
        (unit.ns, name, after, unit.now),
    )
    return after


def advance_reader(unit: Unit, name: str, to: int) -> None:
    unit.fetch()
    [rows] = unit.fetch(Query("SELECT cursor FROM omnirelay_reader WHERE ns = ? AND name = ?", (unit.ns, name)))
    if not rows:
        raise InvalidInput("name", f"no reader {name!r} is registered; call register_reader first")
    if to > unit.head.number:
        raise InvalidInput("to", f"the log ends at {unit.head.number}")
    if to > rows[0][0]:
        unit.transaction.write(
            "UPDATE omnirelay_reader SET cursor = ?, updated_at = ? WHERE ns = ? AND name = ?",
            (to, unit.now, unit.ns, name),
            1,
        )


def drop_reader(unit: Unit, name: str) -> None:
    unit.fetch()
    unit.transaction.write("DELETE FROM omnirelay_reader WHERE ns = ? AND name = ?", (unit.ns, name))
