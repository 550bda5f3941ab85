"""Which events of a log may go into a copy together, and room for the items that come in with them.

A copy keeps what finished for longer than the queue did, which forgets it in the end, and may then see the same request
again, or the same id, or the same item from another queue. So before such an item comes in, the one that stands in its
way is forgotten here, too: not before it has gone through all that happened to it, and not in one transaction with
that, since within a transaction statements are sent together and must not depend on each other's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile

from lease_core import leaving, payload
from lease_core.entering import by_request_id
from lease_core.log import Entry, Gathered
from lease_core.machine import Span, State
from lease_core.model import EventType, WorkItem
from lease_core.recovery import sealing
from lease_core.replay import ReplayDiverged
from lease_core.store import selects
from lease_core.store.base import Query, Store, Transaction
from lease_core.unit import SealedUnit, Unit

_FORGET_ORIGIN = "DELETE FROM omnirelay_origin WHERE ns = ? AND queue_id = ? AND origin_id = ?"


def enters(entry: Entry) -> bool:
    """Whether items come in with this entry that were not here, or not as they are now."""
    return entry.type == EventType.ENQUEUED or _kind(entry) == "replaces"


def parts(store: Store, ns: int, name: str, groups: Sequence[Gathered]) -> Iterator[list[Gathered]]:
    """Events that may share a transaction, in order. Each part must be in the copy before the next is asked for.

    Raises ``ReplayDiverged`` where an item comes in whose place is taken by one that is not finished.
    """
    for part in _of_one_kind(groups):
        while part:
            now, part = _until(part, _make_room(store, ns, name, part))
            yield now


def _of_one_kind(groups: Sequence[Gathered]) -> Iterator[list[Gathered]]:
    """What removes rows, or puts others in their place, stands alone, and so does a request that comes again."""
    part: list[Gathered] = []
    before = ""
    requests: set[str] = set()
    for group in groups:
        for kind, piece in group.parted(_kind):
            asked = _asked(piece)
            if len(set(asked)) < len(asked):  # nothing is forgotten in the moment in which it finished
                raise ReplayDiverged(piece.first, "a request comes in twice at one moment")
            if part and (kind != before or not requests.isdisjoint(asked)):
                yield part
                part, requests = [], set()
            before = kind
            part.append(piece)
            requests.update(asked)
    if part:
        yield part


def _kind(entry: Entry) -> str:
    if entry.type == EventType.PURGED:
        return "removes"
    return "replaces" if entry.type == EventType.RESTORED and entry.enqueued_at is not None else "moves"


def _asked(group: Gathered) -> list[str]:
    return [item.request_id for _, item in _coming(group) if item.request_id is not None]


def _coming(group: Gathered) -> Iterator[tuple[int, WorkItem]]:
    """The items that come in with these events, by id."""
    for entry, items in zip(group.entries, group.items, strict=True):
        if entry.id is not None and enters(entry):
            yield from enumerate(items, entry.id)


def _until(part: list[Gathered], waiting: set[int]) -> tuple[list[Gathered], list[Gathered]]:
    """The part up to the first item that has to wait, and the rest of it."""
    if not waiting:
        return part, []

    def waits(entry: Entry) -> str:
        own = range(entry.id or 0, (entry.id or 0) + entry.n)
        return "waits" if enters(entry) and any(i in waiting for i in own) else ""

    pieces = list(chain.from_iterable(group.parted(waits) for group in part))
    before = [piece for _, piece in takewhile(lambda each: not each[0], pieces)]
    if not before:
        raise ReplayDiverged(pieces[0][1].first, "the place or request of the item is that of one that is not finished")
    return before, [piece for _, piece in pieces[len(before) :]]


class _Coming:
    """The items that come in with some events: their ids, their requests, and what they were where they come from."""

    def __init__(self, groups: list[Gathered]) -> None:
        self.items: dict[int, WorkItem] = dict(chain.from_iterable(map(_coming, groups)))
        self.requests = {item.request_id: i for i, item in self.items.items() if item.request_id is not None}
        self.origins: dict[tuple[str, int], int] = {}
        self.returning: set[int] = set()
        for entry in chain.from_iterable(group.entries for group in groups):
            if entry.id is not None and enters(entry) and "originQueue" in entry.metadata:
                self.origins[entry.metadata["originQueue"], int(entry.metadata["originId"])] = entry.id

    def by_origin(self, store: Store, ns: int) -> list[Query]:
        if not self.origins:
            return []
        queues, ids = (store.pack(sorted(set(each))) for each in zip(*self.origins, strict=True))
        sql = (
            "SELECT queue_id, origin_id, id FROM omnirelay_origin "
            f"WHERE ns = ? AND queue_id {store.member} AND origin_id {store.member}"
        )
        return [Query(sql, (ns, queues, ids))]

    def is_crowded(self, store: Store, ns: int) -> bool:
        """Whether anything is here that could be in their way."""
        queries = [Query("SELECT 1 FROM omnirelay_item WHERE ns = ? AND id >= ? LIMIT 1", (ns, min(self.items)))]
        if self.requests:
            sql = f"SELECT 1 FROM omnirelay_item WHERE ns = ? AND request_id {store.member} LIMIT 1"
            queries.append(Query(sql, (ns, store.pack(sorted(self.requests)))))
        return any(store.read(*queries, *self.by_origin(store, ns)))

    def holders(self, unit: Unit) -> dict[int, int]:
        """Items that are here and may be in the way, each with the id of the one that comes."""
        found = chain.from_iterable(unit.fetch(*by_request_id(unit, sorted(self.requests))))
        holders = {own: self.requests[request] for request, own in found if self.requests[request] != own}
        ranges = selects.merged([(i, i) for i in sorted(self.items)])
        strangers = set(self.origins.values())  # the queue did not know them, so what has their ids here is forgotten
        for row in chain.from_iterable(unit.fetch(*selects.items(unit.store, unit.ns, ranges))):
            item = self.items[row[0]]
            holders[row[0]] = row[0]
            if row[0] not in strangers and payload.to_item(row, item.priority) == item:
                self.returning.add(row[0])
        return holders

    def replace(self, sequence_id: int, span: Span) -> bool:
        """Whether that item, which is here like this, is to be forgotten for one of them.

        One that comes back itself, having been drained, is not: what is known of it goes on. But if it was completed
        since, then the queue had forgotten it, and took it for new.
        """
        return span.state is State.COMPLETED or (span.state is State.DRAINED and sequence_id not in self.returning)

    def forget_origins(self, unit: Unit) -> None:
        """What came from where they come from may be here still, but no longer as what came from there.

        The queue would not have taken them otherwise. It had forgotten the one that came before, and may have got that
        back since, from a drain of its own, which says nothing of where it was from at first.
        """
        for queue, origin, _ in chain.from_iterable(unit.fetch(*self.by_origin(unit.store, unit.ns))):
            if (queue, origin) in self.origins:
                unit.transaction.write(_FORGET_ORIGIN, (unit.ns, queue, origin))


def _make_room(store: Store, ns: int, name: str, part: list[Gathered]) -> set[int]:
    """Forget finished items in whose place others come in. Gives the ids of those that found no room yet."""
    coming = _Coming(part)
    if not coming.items or not coming.is_crowded(store, ns):
        return set()
    return store.run(ns, lambda transaction: _forget_old(store, transaction, ns, name, part))


def _forget_old(store: Store, transaction: Transaction, ns: int, name: str, part: list[Gathered]) -> set[int]:
    unit = SealedUnit(store, transaction)
    sealing.check_follows(unit, ns, name)
    # what came in before a crash has nothing in its way but itself
    fresh = [group for group in part if group.last > unit.head.number]
    if not fresh or fresh[0].first <= unit.head.number:
        return set()
    coming = _Coming(fresh)
    coming.forget_origins(unit)
    holders = coming.holders(unit)
    busy = _moved(fresh, set(holders))
    gone: list[Span] = []
    for one, span in _standing(unit, holders.keys() - busy):
        if coming.replace(one, span):
            gone.append(unit.carve(span, one, one))
        elif span.state is not State.DRAINED:
            busy.add(one)
    for span in gone:
        unit.drop(span)
    leaving.forget(unit, gone)
    unit.write_spans()
    return {holders[i] for i in busy & holders.keys()}


def _moved(groups: list[Gathered], ids: set[int]) -> set[int]:
    """Those of ``ids`` to which something happens in these events."""
    if not ids:
        return set()
    moving = [entry for group in groups for entry in group.entries if entry.id is not None and not enters(entry)]
    return {i for entry in moving for i in range(entry.id or 0, (entry.id or 0) + entry.n) if i in ids}


def _standing(unit: Unit, ids: set[int]) -> Iterator[tuple[int, Span]]:
    """Each item with the span it is in at the moment at which it is asked for."""
    ranges = selects.merged(sorted((i, i) for i in ids))
    unit.load(chain.from_iterable(unit.fetch(*selects.overlapping(unit.store, unit.ns, ranges))))
    for one in sorted(ids):
        [(_, _, span)] = unit.parts(one, one)
        if span is not None:
            yield one, span
