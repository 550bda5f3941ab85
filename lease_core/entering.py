"""How items come in: enqueued by producers, or restored from what a drain handed out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from lease_core import payload
from lease_core.errors import BackpressureActive, InvalidInput, QueueFull
from lease_core.log import Entry, raw
from lease_core.machine import Ended, Moved, Restore, Span, State, decide, replace
from lease_core.model import ErrorRecord, EventType, PendingItem, Receipt, WorkItem, to_datetime, to_micros
from lease_core.payload import Prepared
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

    def told(self) -> BackpressureActive:
        """The same for the caller, with what to do about it."""
        if self.full:
            return QueueFull(
                f"{self.pending} items are pending and the capacity is {self.limit}. Nothing was enqueued; "
                "try again later, or pass wait="
            )
        return BackpressureActive(
            f"{self.pending} items are pending; the queue takes more once there are {self.limit} or fewer. "
            "Nothing was enqueued; try again later, or pass wait="
        )


def by_request_id(unit: Unit, request_ids: list[str]) -> list[Query]:
    if not request_ids:
        return []
    sql = f"SELECT request_id, id FROM omnirelay_item WHERE ns = ? AND request_id {unit.store.member}"
    return [Query(sql, (unit.transaction.ns, unit.store.pack(request_ids)))]


def enqueue(unit: Unit, items: Sequence[Prepared], peer: str | None, principal: str | None) -> list[Receipt]:
    """Add the items that are not here yet. Raises ``NoRoom``, adding nothing, if the queue takes no more now."""
    asked = [prepared.item.request_id for prepared in items if prepared.item.request_id is not None]
    known: dict[str, int] = dict(chain.from_iterable(unit.fetch(*by_request_id(unit, asked))))
    head = unit.head
    receipts: list[Receipt] = []
    fresh: list[Prepared] = []
    first = head.next_id
    for prepared in items:
        request = prepared.item.request_id
        if request is not None and request in known:
            receipts.append(Receipt(known[request], True))
            continue
        if request is not None:
            known[request] = first + len(fresh)
        receipts.append(Receipt(first + len(fresh)))
        fresh.append(prepared)
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


def _add(unit: Unit, first: int, items: list[Prepared], peer: str | None, principal: str | None) -> None:
    now, exclusive = unit.now, unit.head.exclusive
    unit.transaction.insert_items([(first + i, now, *prepared.columns) for i, prepared in enumerate(items)])
    start = 0
    for stop in range(1, len(items) + 1):
        if exclusive is None and stop < len(items) and _alike(items[start].item, items[stop].item, now):
            continue
        item = items[start].item
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
            items=[prepared.json for prepared in items[start:stop]],
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
    ns, store = unit.transaction.ns, unit.store
    requests = by_request_id(unit, [p.item.request_id for p in items if p.item.request_id is not None])
    origins = Query(
        "SELECT queue_id, origin_id, id FROM omnirelay_origin "
        f"WHERE ns = ? AND queue_id {store.member} AND origin_id {store.member}",
        (ns, store.pack(sorted({_origin(p) for p in items})), store.pack([p.sequence_id for p in items])),
    )
    arrived, *known = unit.fetch(origins, *requests)
    here = _Here(
        unit,
        {(queue, origin): own for queue, origin, own in arrived},
        dict(chain.from_iterable(known)),
        [p.sequence_id for p in items],
    )
    return [here.restore(pending, principal) for pending in items]


class _Here:
    """What this queue knows of items that are to be restored."""

    def __init__(
        self, unit: Unit, arrived: dict[tuple[str, int], int], by_request: dict[str, int], ids: list[int]
    ) -> None:
        self._unit = unit
        self._arrived = arrived
        self._by_request = by_request
        ranges = selects.merged(sorted((i, i) for i in {*ids, *by_request.values()}))
        spans = selects.overlapping(unit.store, unit.ns, ranges)
        found = unit.fetch(*spans, *selects.items(unit.store, unit.ns, ranges))
        unit.load(chain.from_iterable(found[: len(spans)]))
        self._rows: dict[int, Row] = {row[0]: row for row in chain.from_iterable(found[len(spans) :])}

    def restore(self, pending: PendingItem, principal: str | None) -> Receipt:
        if self._is_here(pending):
            return self._put_back(pending.sequence_id, pending, principal)
        before = self._arrived.get((_origin(pending), pending.sequence_id))
        if before is not None:
            return Receipt(before, True)
        request = pending.item.request_id
        if request is not None and request in self._by_request:
            return self._put_back(self._by_request[request], pending, principal)
        return self._add(pending, principal)

    def _is_here(self, pending: PendingItem) -> bool:
        """Whether the item that has this id here is the very one. Ids can be used again once an item is forgotten."""
        row = self._rows.get(pending.sequence_id)
        if row is None or pending.queue_id not in (None, self._unit.head.queue_id):
            return False
        same: bool = row[7] == to_micros(pending.enqueued_at)
        return same and payload.to_item(row, pending.item.priority) == pending.item

    def _put_back(self, own_id: int, pending: PendingItem, principal: str | None) -> Receipt:
        """The item is still known here: if it is drained it comes back, otherwise it did already."""
        unit = self._unit
        [(_, _, span)] = unit.parts(own_id, own_id)
        if span is None or span.state is not State.DRAINED:
            return Receipt(own_id, True)
        part = unit.carve(span, own_id, own_id)
        item = payload.to_item(self._rows[own_id], part.priority)
        if pending.queue_id not in (None, unit.head.queue_id):
            # it has been elsewhere since: what happened to it there comes back with it
            unit.forget_errors([part])
            unit.drop(part)
            enqueued_at = to_datetime(self._rows[own_id][7])
            _restore_new(unit, replace(pending, item=item, enqueued_at=enqueued_at), own_id, principal)
            return Receipt(own_id)
        outcome = decide(part, Restore(_available(item, unit.now)), unit.now)
        assert isinstance(outcome, Moved)
        assert outcome.to is not None
        outcome = Moved(with_key(unit, outcome.to, item), outcome.events)
        unit.apply(part, outcome, principal=principal, items=[item], error=pending.last_error)
        return Receipt(own_id)

    def _add(self, pending: PendingItem, principal: str | None) -> Receipt:
        unit, head = self._unit, self._unit.head
        own_id = head.next_id if pending.sequence_id in self._rows else pending.sequence_id
        head.next_id = max(head.next_id, own_id + 1)
        row = payload.to_row(own_id, to_micros(pending.enqueued_at), pending.item)
        unit.transaction.insert_items([row])
        self._rows[own_id] = (own_id, *row[2:], row[1])
        if pending.item.request_id is not None:
            self._by_request[pending.item.request_id] = own_id
        origin = _origin(pending)
        if (origin, pending.sequence_id) != (head.queue_id, own_id):
            self._arrived[origin, pending.sequence_id] = own_id
            keep_origin(unit, origin, pending.sequence_id, pending.namespace, own_id)
            _restore_new(unit, pending, own_id, principal, {"originQueue": origin})
        else:
            _restore_new(unit, pending, own_id, principal)
        return Receipt(own_id)


def keep_origin(unit: Unit, queue_id: str, origin_id: int, namespace: str | None, own_id: int) -> None:
    """Remember where an item came from, so that restoring it again is still once."""
    unit.transaction.write(_INSERT_ORIGIN, (unit.ns, queue_id, origin_id, namespace, own_id))


def _origin(pending: PendingItem) -> str:
    """The queue an item comes from, as far as it is known."""
    return pending.queue_id or (f"namespace:{pending.namespace}" if pending.namespace else "")


def _restore_new(
    unit: Unit, pending: PendingItem, own_id: int, principal: str | None, origin: dict[str, str] | None = None
) -> None:
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
        metadata={"originNamespace": pending.namespace or "", "originId": str(pending.sequence_id), **(origin or {})},
        items=[raw(pending.item)],
    )
    unit.record(entry)
    unit.keep_error(span, *history)
    unit.add(span)


def with_key(unit: Unit, span: Span, item: WorkItem) -> Span:
    """The span with its exclusivity key, if this queue is exclusive."""
    key = payload.exclusive_key(item.resource_type, item.resource_id, item.partition_key, unit.head.exclusive)
    return replace(span, key=key)
