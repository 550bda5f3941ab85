"""How items leave without being completed: drained for elsewhere, or dead and then requeued or purged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from lease_core import payload
from lease_core.entering import with_key
from lease_core.machine import Drain, Moved, Purge, Requeue, Span, State, decide
from lease_core.model import LeaseToken, PendingItem, to_datetime
from lease_core.store import selects
from lease_core.store.base import Query, Row
from lease_core.unit import Unit

# ready first, in the order in which they would have been leased; then delayed ones; then those behind their key
_WAITING = (
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready = 1 "
    "ORDER BY priority DESC, available_at, first LIMIT ?",
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 2 "
    "ORDER BY available_at, first LIMIT ?",
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 0 "
    "ORDER BY available_at, first LIMIT ?",
)
_FORGET = tuple(
    f"DELETE FROM {table} WHERE ns = ? AND {column} BETWEEN ? AND ?"
    for table, column in (("omnirelay_item", "id"), ("omnirelay_origin", "id"))
)


def drain(unit: Unit, limit: int, principal: str | None) -> list[PendingItem]:
    """Take up to ``limit`` pending items out of the queue."""
    found = unit.fetch(*(Query(sql, (unit.transaction.ns, limit)) for sql in _WAITING))
    taken: list[Span] = []
    for span in unit.load(chain.from_iterable(found)):
        if limit <= 0:
            break
        taken.append(unit.carve(span, span.first, min(span.last, span.first + limit - 1)))
        limit -= len(taken[-1])
    items = describe(unit, taken)
    at = 0
    for span in taken:
        outcome = decide(span, Drain(), unit.now)
        assert isinstance(outcome, Moved)
        names = _names(items[at : at + len(span)])
        unit.apply(span, outcome, names.__getitem__, principal=principal)
        at += len(span)
    return items


def _names(items: Sequence[PendingItem]) -> dict[int, tuple[str, str, str | None]]:
    return {p.sequence_id: (p.item.resource_type, p.item.resource_id, p.item.partition_key) for p in items}


def describe(unit: Unit, spans: Sequence[Span]) -> list[PendingItem]:
    """Spans of items outside of a lease, as the items they are."""
    if not spans:
        return []
    ranges = selects.merged(sorted((span.first, span.last) for span in spans))
    troubled = selects.merged(sorted((span.first, span.last) for span in spans if span.has_errors))
    item_queries = selects.items(unit.store, unit.ns, ranges)
    found = unit.fetch(*item_queries, *selects.errors(unit.store, unit.ns, troubled))
    return assemble(
        spans,
        list(chain.from_iterable(found[: len(item_queries)])),
        list(chain.from_iterable(found[len(item_queries) :])),
        unit.head.namespace,
        unit.head.queue_id,
    )


def assemble(
    spans: Sequence[Span], item_rows: list[Row], error_rows: list[Row], namespace: str, queue_id: str
) -> list[PendingItem]:
    """Put items together from their spans, rows and errors, in the order of the spans."""
    stored = {row[0]: row for row in item_rows}
    troubled = [i for span in spans if span.has_errors for i in range(span.first, span.last + 1)]
    errors = payload.errors_by_item(error_rows, troubled)
    items = []
    for span in spans:
        for offset in range(len(span)):
            sequence_id = span.first + offset
            if sequence_id not in stored:
                continue  # purged or forgotten since its span was read
            history = tuple(errors.get(sequence_id, ()))
            items.append(
                PendingItem(
                    payload.to_item(stored[sequence_id], span.priority),
                    sequence_id,
                    span.attempt,
                    to_datetime(stored[sequence_id][7]),
                    history[-1].error if history else None,
                    last_token(span, offset),
                    span.state is State.DEAD,
                    namespace,
                    queue_id,
                    history,
                )
            )
    return items


def last_token(span: Span, offset: int) -> LeaseToken | None:
    if span.lease_id is None:
        return None
    return LeaseToken(span.first + offset, span.leased_attempt, span.lease_id, span.fence + offset)


def requeue_dead(unit: Unit, ids: Sequence[int], principal: str | None) -> list[int]:
    """Give dead items all of their attempts again. Ids that are not dead letters are passed over."""
    parts, rows = _dead(unit, ids)
    done: list[int] = []
    for part in parts:
        for span in _one_by_one(unit, part) if unit.head.exclusive else [part]:
            outcome = decide(span, Requeue(), unit.now)
            assert isinstance(outcome, Moved)
            items = [payload.to_item(rows[i], span.priority) for i in range(span.first, span.last + 1)]
            if unit.head.exclusive and outcome.to is not None:
                outcome = Moved(with_key(unit, outcome.to, items[0]), outcome.events)
            unit.apply(span, outcome, principal=principal, items=items)
            done.extend(range(span.first, span.last + 1))
    return done


def purge_dead(unit: Unit, ids: Sequence[int], principal: str | None) -> list[int]:
    """Forget dead items for good. Ids that are not dead letters are passed over."""
    parts, rows = _dead(unit, ids)
    for span in parts:
        outcome = decide(span, Purge(), unit.now)
        assert isinstance(outcome, Moved)
        unit.apply(span, outcome, lambda i: payload.to_name(rows[i]), principal=principal)
    forget(unit, parts)
    return [i for span in parts for i in range(span.first, span.last + 1)]


def forget(unit: Unit, spans: Sequence[Span]) -> None:
    """Delete what is stored about items whose spans are gone."""
    for span in spans:
        for sql in _FORGET:
            unit.transaction.write(sql, (unit.ns, span.first, span.last))
    unit.forget_errors(spans)


def _dead(unit: Unit, ids: Sequence[int]) -> tuple[list[Span], dict[int, Row]]:
    """The dead among the ids, as spans of nothing else, and their item rows."""
    ranges = selects.merged([(i, i) for i in ids])
    spans = selects.overlapping(unit.store, unit.transaction.ns, ranges)
    found = unit.fetch(*spans, *selects.items(unit.store, unit.transaction.ns, ranges))
    unit.load(chain.from_iterable(found[: len(spans)]))
    rows = {row[0]: row for row in chain.from_iterable(found[len(spans) :])}
    dead = []
    for lo, hi in ranges:
        for first, last, span in list(unit.parts(lo, hi)):
            if span is not None and span.state is State.DEAD:
                dead.append(unit.carve(span, first, last))
    return dead, rows


def _one_by_one(unit: Unit, span: Span) -> list[Span]:
    singles = []
    for sequence_id in range(span.first, span.last):
        singles.append(unit.carve(span, sequence_id, sequence_id))
        span = span.cut(sequence_id + 1, span.last)
    return [*singles, span]
