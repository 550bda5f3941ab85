"""How items come in: enqueued by producers, or restored from what a drain handed out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from lease_core import payload
from lease_core.errors import InvalidInput
from lease_core.log import Entry
from lease_core.machine import Ended, Moved, Restore, Span, State, decide, replace
from lease_core.model import ErrorRecord, EventType, PendingItem, Receipt, WorkItem, to_datetime, to_micros
from lease_core.store import selects
from lease_core.store.base import Query, Row
from lease_core.unit import Unit

_INSERT_ORIGIN = "INSERT INTO omnirelay_origin (ns, queue_id, origin_id, namespace, id) VALUES (?, ?, ?, ?, ?)"


class NoRoom(Exception):
    """The queue takes nothing now. ``full``: because of its capacity rather than its high mark."""

    def __init__(self, pending: int, limit: int | None, full: bool) -> None:
        super().__init__(pending, limit, full)
        self.pending = pending
        self.limit = limit
        self.full = full


def by_request_id(unit: Unit, request_ids: list[str]) -> list[Query]:
    if not request_ids:
        return []
    sql = f"SELECT request_id, id FROM omnirelay_item WHERE ns = ? AND request_id {unit.store.member}"
    return [Query(sql, (unit.transaction.ns, unit.store.pack(request_ids)))]


def enqueue(unit: Unit, items: Sequence[WorkItem], peer: str | None, principal: str | None) -> list[Receipt]:
    """Add the items that are not here yet. Raises ``NoRoom``, adding nothing, if the queue takes no more now."""
    asked = [item.request_id for item in items if item.request_id is not None]
    known: dict[str, int] = dict(chain.from_iterable(unit.fetch(*by_request_id(unit, asked))))
    head = unit.head
    receipts: list[Receipt] = []
    fresh: list[WorkItem] = []
    first = head.next_id
    for item in items:
        request = item.request_id
        if request is not None and request in known:
            receipts.append(Receipt(known[request], True))
            continue
        if request is not None:
            known[request] = first + len(fresh)
        receipts.append(Receipt(first + len(fresh)))
        fresh.append(item)
    if fresh:
        check_room(unit, len(fresh))
        head.next_id += len(fresh)
        _add(unit, first, fresh, peer, principal)
    return receipts


def check_room(unit: Unit, count: int) -> None:
    head = unit.head
    if head.capacity is not None and count > head.capacity:
        raise InvalidInput("items", f"{count} given, but the queue's capacity is {head.capacity}; split the call")
    if head.backpressure:
        raise NoRoom(head.pending, head.low_mark, full=False)
    if head.capacity is not None and head.pending + count > head.capacity:
        raise NoRoom(head.pending, head.capacity, full=True)


def _add(unit: Unit, first: int, items: list[WorkItem], peer: str | None, principal: str | None) -> None:
    now, exclusive = unit.now, unit.head.exclusive
    unit.transaction.insert_items([payload.to_row(first + i, now, item) for i, item in enumerate(items)])
    start = 0
    for stop in range(1, len(items) + 1):
        if exclusive is None and stop < len(items) and _alike(items[start], items[stop], now):
            continue
        item = items[start]
        key = payload.exclusive_key(item.resource_type, item.resource_id, item.partition_key, exclusive)
        span = Span(first + start, first + stop - 1, State.PENDING, item.priority, _available(item, now), key=key)
        entry = Entry(
            EventType.ENQUEUED,
            n=len(span),
            id=span.first,
            pending=unit.head.pending,
            active=unit.head.active,
            pending_step=1,
            peer=peer,
            principal=principal,
            available_at=span.available_at if span.available_at != now else None,
            items=items[start:stop],
        )
        unit.record(entry)
        unit.add(span)
        start = stop


def _alike(a: WorkItem, b: WorkItem, now: int) -> bool:
    return a.priority == b.priority and (a.not_before is b.not_before or _available(a, now) == _available(b, now))


def _available(item: WorkItem, now: int) -> int:
    return now if item.not_before is None else max(now, to_micros(item.not_before))


def restore(unit: Unit, items: Sequence[PendingItem], principal: str | None) -> list[Receipt]:
    """Put drained items back, here or in another queue. What was restored before is left alone."""
    requests = [p.item.request_id for p in items if p.item.request_id is not None]
    ranges = selects.merged(sorted((p.sequence_id, p.sequence_id) for p in items))
    spans = selects.overlapping(unit.store, unit.transaction.ns, ranges)
    stored = selects.items(unit.store, unit.transaction.ns, ranges)
    ids = unit.store.pack([p.sequence_id for p in items])
    origins = [
        Query(f"SELECT queue_id, origin_id, id FROM omnirelay_origin WHERE ns = ? AND {key} {unit.store.member}", given)
        for key, given in (("origin_id", (unit.transaction.ns, ids)), ("id", (unit.transaction.ns, ids)))
    ]
    lookups = by_request_id(unit, requests)
    rows = unit.fetch(*lookups, *origins, *spans, *stored)
    at = len(lookups)
    known: dict[str, int] = dict(chain.from_iterable(rows[:at]))
    here = {(queue, origin): own for queue, origin, own in chain(*rows[at : at + 2])}
    unit.load(chain.from_iterable(rows[at + 2 : at + 2 + len(spans)]))
    by_id = {row[0]: row for row in chain.from_iterable(rows[at + 2 + len(spans) :])}
    if known:
        at_once = selects.merged(sorted((own, own) for own in known.values()))
        unit.load(chain.from_iterable(unit.fetch(*selects.overlapping(unit.store, unit.ns, at_once))))
    foreign = set(here.values())
    return [_restore_one(unit, pending, known, here, foreign, by_id, principal) for pending in items]


def _restore_one(
    unit: Unit,
    pending: PendingItem,
    known: dict[str, int],
    here: dict[tuple[str, int], int],
    foreign: set[int],
    by_id: dict[int, Row],
    principal: str | None,
) -> Receipt:
    sequence_id, queue_id = pending.sequence_id, _origin(pending)
    arrived = here.get((queue_id, sequence_id))
    if arrived is not None:
        return Receipt(arrived, True)
    if sequence_id in by_id and sequence_id not in foreign and _same_item(unit, pending, by_id[sequence_id]):
        return _restore_own(unit, sequence_id, pending, principal)
    if pending.item.request_id is not None and pending.item.request_id in known:
        return _restore_own(unit, known[pending.item.request_id], pending, principal)
    own_id = sequence_id
    if sequence_id in by_id:
        own_id = unit.head.next_id
    unit.head.next_id = max(unit.head.next_id, own_id + 1)
    row = payload.to_row(own_id, to_micros(pending.enqueued_at), pending.item)
    by_id[own_id] = (own_id, *row[2:], row[1])
    if pending.item.request_id is not None:
        known[pending.item.request_id] = own_id
    if queue_id != unit.head.queue_id:
        here[queue_id, sequence_id] = own_id
        foreign.add(own_id)
        unit.transaction.write(_INSERT_ORIGIN, (unit.ns, queue_id, sequence_id, pending.namespace, own_id))
    unit.transaction.insert_items([row])
    _restore_new(unit, pending, own_id, principal)
    return Receipt(own_id)


def _same_item(unit: Unit, pending: PendingItem, row: Row) -> bool:
    """Whether the item that has this id here is the very one that was drained."""
    if pending.queue_id is not None:
        return pending.queue_id == unit.head.queue_id
    same: bool = (
        row[7] == to_micros(pending.enqueued_at) and payload.to_item(row, pending.item.priority) == pending.item
    )
    return same


def _origin(pending: PendingItem) -> str:
    """The queue an item comes from, as far as it is known."""
    return pending.queue_id or (f"namespace:{pending.namespace}" if pending.namespace else "")


def _restore_own(unit: Unit, own_id: int, pending: PendingItem, principal: str | None) -> Receipt:
    """The item is still known here: if it is drained it comes back, otherwise it did already."""
    [(_, _, span)] = unit.parts(own_id, own_id)
    if span is None or span.state is not State.DRAINED:
        return Receipt(own_id, True)
    part = unit.carve(span, own_id, own_id)
    outcome = decide(part, Restore(_available(pending.item, unit.now)), unit.now)
    assert isinstance(outcome, Moved)
    to = outcome.to
    assert to is not None
    outcome = Moved(with_key(unit, to, pending.item), outcome.events)
    unit.apply(part, outcome, principal=principal, items=[pending.item], error=pending.last_error)
    return Receipt(own_id)


def _restore_new(unit: Unit, pending: PendingItem, own_id: int, principal: str | None) -> None:
    token = pending.last_token
    dead = pending.dead_lettered
    history = pending.errors
    if pending.last_error is not None and not history:
        history = (ErrorRecord(pending.attempt, to_datetime(unit.now), pending.last_error),)
    span = Span(
        own_id,
        own_id,
        State.DEAD if dead else State.PENDING,
        pending.item.priority,
        unit.now if dead else _available(pending.item, unit.now),
        attempt=pending.attempt,
        lease_id=token.lease_id if token else None,
        fence=token.fence if token else 0,
        ended=Ended.RELEASED if token and token.attempt == pending.attempt + 1 else None,
        has_errors=bool(history),
    )
    span = span if dead else with_key(unit, span, pending.item)
    entry = Entry(
        EventType.RESTORED,
        id=own_id,
        pending=unit.head.pending,
        active=unit.head.active,
        pending_step=int(not dead),
        principal=principal,
        attempt=span.leased_attempt,
        used=span.attempt,
        lease=span.lease_id,
        fence=span.fence or None,
        requeued=not dead,
        available_at=span.available_at,
        enqueued_at=to_micros(pending.enqueued_at),
        error=pending.last_error,
        errors=history,
        metadata={"originNamespace": pending.namespace or "", "originId": str(pending.sequence_id)},
        items=[pending.item],
    )
    unit.record(entry)
    unit.keep_error(span, *history)
    unit.add(span)


def with_key(unit: Unit, span: Span, item: WorkItem) -> Span:
    """The span with its exclusivity key, if this queue is exclusive."""
    key = payload.exclusive_key(item.resource_type, item.resource_id, item.partition_key, unit.head.exclusive)
    return replace(span, key=key)
