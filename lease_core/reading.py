"""Looking without touching: numbers, events, leases, dead letters, single items. None of it takes the lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import msgspec

from lease_core import leaving, log, log_lines, payload
from lease_core.errors import EventsPruned
from lease_core.machine import Span, State
from lease_core.model import (
    Completion,
    ErrorRecord,
    ItemStatus,
    Lease,
    LeaseEvent,
    PendingItem,
    QueueStats,
    to_datetime,
)
from lease_core.store import selects
from lease_core.store.base import HEAD_COLUMNS, Head, Query, Row, Store

# one part for each kind: asked for both at once, SQLite goes through all items there are instead of the index
_DELAYED = "SELECT " + " + ".join(
    "coalesce((SELECT sum(last - first + 1) FROM omnirelay_span "
    f"WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = {ready} AND available_at > ?), 0)"
    for ready in (0, 2)
)
# the oldest of each priority, by jumping from priority to priority in the index
_READY = "FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready = 1"
_OLDEST = (
    f"WITH RECURSIVE level(p) AS (SELECT max(priority) {_READY} "
    f"UNION ALL SELECT (SELECT max(priority) {_READY} AND priority < p) FROM level WHERE p IS NOT NULL) "
    f"SELECT min((SELECT min(available_at) {_READY} AND priority = p)) FROM level"
)
_DUE_SPANS = (
    "SELECT first, last FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 2 "
    "AND available_at <= ? ORDER BY available_at, first LIMIT ?"
)
_PAGES = (8, 64, 512, 2_000)
_PAGE_BYTES = 16 * 1024 * 1024
# up to the row that has the last event that is wanted: rows may be large, and the next call would read them again
_DOCUMENTS = (
    "SELECT last, first, document FROM omnirelay_log WHERE ns = ? AND last > ? "
    "AND last <= (SELECT coalesce(min(last), ?) FROM omnirelay_log WHERE ns = ? AND last >= ?) ORDER BY last LIMIT ?"
)
_NO_END = 2**63 - 1


def head(store: Store, ns: int) -> Head:
    [[row]] = store.read(Query(f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE ns = ?", (ns,)))
    return Head(*row)


def stats(store: Store, ns: int) -> QueueStats:
    now = store.read_now()
    [[row], [[delayed]], [[oldest]], [[due]]] = store.read(
        Query(f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE ns = ?", (ns,)),
        Query(_DELAYED, (ns, now, ns, now)),
        Query(_OLDEST, (ns, ns, ns)),
        Query(
            "SELECT min(available_at) FROM omnirelay_span WHERE ns = ? AND state = 1 AND ready <> 1 AND ready = 2",
            (ns,),
        ),
    )
    current = Head(*row)
    waiting_since = min((at for at in (oldest, due) if at is not None and at <= now), default=None)
    return QueueStats(
        pending=current.pending,
        active=current.active,
        delayed=int(delayed),
        dead=current.dead,
        oldest_pending_age=None if waiting_since is None else (now - waiting_since) / 1_000_000,
        backpressure=bool(current.backpressure),
        head=current.number,
        completed=current.completed,
    )


def waiting(store: Store, ns: int, limit: int) -> dict[str | None, int]:
    """The partition keys of the first ``limit`` items that could be leased now, each with how many of them have it."""
    now = store.read_now()
    # delayed items that have come due are made ready by the next lease; until then they stand behind the others
    [spans, due] = store.read(
        Query(f"SELECT first, last {_READY} ORDER BY priority DESC, available_at, first LIMIT ?", (ns, limit)),
        Query(_DUE_SPANS, (ns, now, limit)),
    )
    ranges: list[selects.Range] = []
    for first, last in chain(spans, due):
        if limit <= 0:
            break
        ranges.append((first, min(last, first + limit - 1)))
        limit -= ranges[-1][1] - first + 1
    found = store.read(*selects.items(store, ns, selects.adjoining(ranges), selects.NAME_COLUMNS)) if ranges else []
    keys = {row[0]: row[3] for row in chain.from_iterable(found)}
    # an item that was forgotten between the two reads is not waiting any more
    return dict(Counter(keys[i] for lo, hi in ranges for i in range(lo, hi + 1) if i in keys))


def events(store: Store, ns: int, namespace: str, after: int, limit: int) -> list[LeaseEvent]:
    """Up to ``limit`` events after number ``after``; fewer if they are very large, none only at the end."""
    found: list[LeaseEvent] = []
    for first, _, document in documents(store, ns, after, limit):
        for event in log.expand(namespace, first, document, after):
            found.append(event)
            if len(found) == limit:
                return found
    return found


def event_payload(store: Store, ns: int, namespace: str, after: int, limit: int) -> tuple[bytes, int]:
    """The same as ``events``, encoded as the wire has them, each ended by a line break; and how many they are."""
    pieces: list[bytes] = []
    count = 0
    for first, _, document in documents(store, ns, after, limit):
        more, added = log_lines.pieces(namespace, first, document, after, limit - count)
        pieces += more
        count += added
        if count == limit:
            break
    return b"".join(pieces), count


def completions(store: Store, ns: int, after: int, upto: int | None, limit: int) -> tuple[list[Completion], int]:
    """Completions with a result after number ``after``, and the number up to which the log was read for them."""
    found: list[Completion] = []
    for first, last, document in documents(store, ns, after, limit):
        for completion in log.completions(first, document):
            if completion.sequence_number <= after:
                continue
            if upto is not None and completion.sequence_number > upto:
                return found, upto
            found.append(completion)
        after = last
        if upto is not None and after >= upto:
            return found, upto
    return found, after


def documents(store: Store, ns: int, after: int, limit: int) -> Iterator[tuple[int, int, bytes]]:
    """Log rows from ``after`` on, read in growing pages so that neither a few nor very many cost too much.

    From the second page on it is known how many events a row has, and no more rows are read than should be needed.
    """
    size = seen = 0
    begun, until = after, after + limit
    for most in chain(_PAGES, repeat(_PAGES[-1])):
        page = min(most, 2 + (until - after) * seen // (after - begun)) if seen else most
        [rows] = store.read(Query(_DOCUMENTS, (ns, after, _NO_END, ns, until, page)))
        if rows and rows[0][1] > after + 1:  # the log is dense: what is missing was pruned
            raise EventsPruned(after, rows[0][1])
        if not rows:
            # asked for afterwards: if something came and was pruned in between, then that was missed
            [[[pruned]]] = store.read(Query("SELECT pruned FROM omnirelay_head WHERE ns = ?", (ns,)))
            if after < pruned:
                raise EventsPruned(after, pruned + 1)
        for last, first, document in rows:
            yield first, last, bytes(document)
            size += len(document)
            after = last
        seen += len(rows)
        if len(rows) < page or after >= until or size > _PAGE_BYTES:
            return


def readers(store: Store, ns: int) -> dict[str, int]:
    [rows] = store.read(Query("SELECT name, cursor FROM omnirelay_reader WHERE ns = ? ORDER BY name", (ns,)))
    return {str(name): int(cursor) for name, cursor in rows}


def leases(store: Store, ns: int, limit: int, bodies: bool) -> list[Lease]:
    """Leases now held, those that end soonest first; an expired one nobody has noticed yet is among them."""
    [rows] = store.read(
        Query(
            f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 2 ORDER BY expires_at LIMIT ?",
            (ns, limit),
        )
    )
    spans = _limited(map(selects.to_span, rows), limit)
    return [
        Lease(
            status.item,
            status.token,
            status.owner_peer_id or "",
            status.available_at or status.enqueued_at,
            status.expires_at or status.enqueued_at,
            status.enqueued_at,
            status.errors[-1].error if status.errors else None,
        )
        for status in _statuses(store, ns, spans, selects.ITEM_COLUMNS if bodies else selects.BODILESS_COLUMNS)
        if status.token is not None
    ]


def inspect(store: Store, ns: int, ids: Sequence[int]) -> list[ItemStatus]:
    """Where each of the items stands. Ids that are not known (any more) are left out."""
    ranges = selects.merged([(i, i) for i in ids])
    wanted = set(ids)
    found = chain.from_iterable(store.read(*selects.overlapping(store, ns, ranges)))
    spans = {row[0]: selects.to_span(row) for row in found}
    return [status for status in _statuses(store, ns, _within(spans, ranges)) if status.sequence_id in wanted]


def _within(spans: dict[int, Span], ranges: Sequence[selects.Range]) -> list[Span]:
    """The parts of the spans that lie in the ranges; both are disjoint, and the ranges in order."""
    parts = []
    ordered = sorted(spans.values(), key=lambda span: span.first)
    at = 0
    for lo, hi in ranges:
        while at < len(ordered) and ordered[at].last < lo:
            at += 1
        upto = at
        while upto < len(ordered) and ordered[upto].first <= hi:
            span = ordered[upto]
            parts.append(span.cut(max(span.first, lo), min(span.last, hi)))
            upto += 1
    return parts


def set_aside(
    store: Store, ns: int, state: State, after: int, limit: int, namespace: str, queue_id: str
) -> list[PendingItem]:
    """Dead or drained items with ids above ``after``."""
    [before, rows] = store.read(
        Query(
            f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = {state.value} "
            "AND state IN (4, 5) AND first <= ? ORDER BY first DESC LIMIT 1",
            (ns, after),
        ),
        Query(
            f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = {state.value} "
            "AND state IN (4, 5) AND first > ? ORDER BY first LIMIT ?",
            (ns, after, limit),
        ),
    )
    spans = [selects.to_span(row) for row in chain(before, rows)]
    rest = _limited((span.cut(max(span.first, after + 1), span.last) for span in spans if span.last > after), limit)
    ranges = selects.merged([(span.first, span.last) for span in rest])
    item_queries = selects.items(store, ns, ranges)
    found = store.read(*item_queries, *selects.errors(store, ns, _troubled(rest))) if rest else []
    item_rows = list(chain.from_iterable(found[: len(item_queries)]))
    return leaving.assemble(rest, item_rows, list(chain.from_iterable(found[len(item_queries) :])), namespace, queue_id)


def _troubled(spans: Sequence[Span]) -> list[selects.Range]:
    return selects.merged(sorted((span.first, span.last) for span in spans if span.has_errors))


def _limited(spans: Iterator[Span], limit: int) -> list[Span]:
    """The first spans, cut so that they hold ``limit`` items in all."""
    kept = []
    for span in spans:
        if limit <= 0:
            break
        kept.append(span.cut(span.first, min(span.last, span.first + limit - 1)))
        limit -= len(kept[-1])
    return kept


def _statuses(store: Store, ns: int, spans: list[Span], columns: str = selects.ITEM_COLUMNS) -> list[ItemStatus]:
    if not spans:
        return []
    ranges = selects.merged(sorted((span.first, span.last) for span in spans))
    item_queries = selects.items(store, ns, ranges, columns)
    found = store.read(*item_queries, *selects.errors(store, ns, _troubled(spans)))
    rows = {row[0]: row for row in chain.from_iterable(found[: len(item_queries)])}
    errors = payload.errors_by_item(list(chain.from_iterable(found[len(item_queries) :])), list(rows))
    return [
        _status(span, offset, rows[span.first + offset], tuple(errors.get(span.first + offset, ())))
        for span in spans
        for offset in range(len(span))
        if span.first + offset in rows
    ]


def _status(span: Span, offset: int, row: Row, errors: tuple[ErrorRecord, ...]) -> ItemStatus:
    finished = span.state in (State.COMPLETED, State.DEAD, State.DRAINED)
    at = to_datetime(span.available_at)
    return ItemStatus(
        sequence_id=span.first + offset,
        state=span.state.name.lower(),
        item=payload.to_item(row, span.priority),
        attempt=span.attempt,
        enqueued_at=to_datetime(row[7]),
        available_at=None if finished else at,
        owner_peer_id=span.owner,
        token=leaving.last_token(span, offset),
        expires_at=None if span.expires_at is None else to_datetime(span.expires_at),
        finished_at=at if finished else None,
        result=None if span.result is None else msgspec.json.decode(span.result),
        errors=errors,
    )
