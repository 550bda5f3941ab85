"""How a transaction's events are kept: one row, one JSON document, however many items it touched.

A transaction mostly does one thing to many neighbours, so the document holds *entries*: one entry says what happened
to ``n`` items with consecutive ids. Each of those is an event with its own number; ``expand`` gives them back one by
one. Writing costs per entry, not per event, which is what makes a large batch cheap.

Unknown keys in an entry are skipped, and an entry of an unknown type is handed on with its type, so older readers
survive newer writers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from operator import attrgetter
from typing import Any

import msgspec

from lease_core.model import (
    SCHEMA_VERSION,
    Completion,
    ErrorRecord,
    EventType,
    LeaseEvent,
    LeaseToken,
    WorkItem,
    to_datetime,
    to_micros,
)


class Entry(msgspec.Struct, omit_defaults=True):
    """One thing that happened to ``n`` items in a row.

    ``pending`` and ``active`` are the depth before it, the ``*_step`` fields how each event changes it. ``attempt`` is
    the lease's, ``used`` what the item has used up where that differs. Lists hold one value an item; a plain value
    stands for all.
    """

    type: str
    n: int = 1
    id: int | None = None
    pending: int = 0
    active: int = 0
    pending_step: int = 0
    active_step: int = 0
    peer: str | None = None
    principal: str | None = None
    attempt: int | None = None
    used: int | None = None
    lease: str | None = None
    fence: int | None = None
    expires_at: int | None = None
    available_at: int | None = None
    enqueued_at: int | None = None
    requeued: bool | None = None
    error: str | None = None
    errors: tuple[ErrorRecord, ...] = ()
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] = {}
    items: list[msgspec.Raw] | None = None
    resource_type: str | list[str] | None = None
    resource_id: str | list[str] | None = None
    partition_key: str | list[str | None] | None = None


class Document(msgspec.Struct):
    """What one transaction appended: ``at`` is its time, ``v`` the schema version."""

    v: int
    at: int
    entries: list[Entry]


Name = tuple[str, str, str | None]
"""An item's resource type, resource id and partition key."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Document)
_item_decoder = msgspec.json.Decoder(WorkItem)
_KNOWN = frozenset(EventType)


def encode(at: int, entries: list[Entry]) -> bytes:
    return _encoder.encode(Document(SCHEMA_VERSION, at, entries))


def raw(item: WorkItem) -> msgspec.Raw:
    """The item as an entry holds it."""
    return msgspec.Raw(_encoder.encode(item))


def name_entry(entry: Entry, names: list[Name]) -> None:
    """Write the items' names into the entry, once where they are all alike."""
    types, ids, partitions = zip(*names, strict=True)
    entry.resource_type = _shortest(types)
    entry.resource_id = _shortest(ids)
    entry.partition_key = _shortest(partitions)


def _shortest(values: tuple[Any, ...]) -> Any:
    first = values[0]
    return first if values.count(first) == len(values) else list(values)


def expand(namespace: str, first: int, document: bytes, after: int = 0) -> Iterator[LeaseEvent]:
    """The events of one document whose numbers begin at ``first``, leaving out those up to ``after``."""
    parsed = _decoder.decode(document)
    at = to_datetime(parsed.at)
    number = first
    for entry in parsed.entries:
        for index in range(max(0, after + 1 - number), entry.n):
            yield _event(namespace, number + index, at, parsed.v, entry, index)
        number += entry.n


def completions(first: int, document: bytes) -> Iterator[Completion]:
    """What one document says was completed with a result, an entry at a time rather than an event."""
    parsed = _decoder.decode(document)
    number = first
    for entry in parsed.entries:
        number += entry.n
        if entry.type == EventType.COMPLETED and entry.id is not None and entry.result is not msgspec.UNSET:
            yield Completion(
                number - 1,
                (entry.id, entry.id + entry.n - 1),
                entry.lease or "",
                entry.attempt or 0,
                entry.fence or 0,
                entry.peer,
                to_datetime(parsed.at),
                msgspec.json.decode(entry.result),
            )


class Gathered(msgspec.Struct):
    """Events that happened at one moment, as the entries of one document; ``last`` is the number of the last.

    ``items`` has, for each entry, the whole items that it carries, if any.
    """

    first: int
    last: int
    at: int
    version: int
    entries: list[Entry]
    items: list[list[WorkItem]]
    stored: bytes | None = None

    def document(self) -> bytes:
        return self.stored or _encoder.encode(Document(self.version, self.at, self.entries))

    def parted(self, kind: Callable[[Entry], str]) -> list[tuple[str, Gathered]]:
        """The same events, parted where entries are of different kinds."""
        kinds = [kind(entry) for entry in self.entries]
        if len(set(kinds)) == 1:
            return [(kinds[0], self)]
        parts: list[tuple[str, Gathered]] = []
        number = self.first
        for this, entry, items in zip(kinds, self.entries, self.items, strict=True):
            if not parts or parts[-1][0] != this:
                parts.append((this, Gathered(number, 0, self.at, self.version, [], [])))
            part = parts[-1][1]
            part.entries.append(entry)
            part.items.append(items)
            number += entry.n
            part.last = number - 1
        return parts


def parse(first: int, document: bytes) -> Gathered:
    """A document as it is stored, whose numbers begin at ``first``."""
    parsed = _decoder.decode(document)
    items = [
        [] if entry.items is None else [_item_decoder.decode(each) for each in entry.items] for entry in parsed.entries
    ]
    last = first - 1 + sum(entry.n for entry in parsed.entries)
    return Gathered(first, last, parsed.at, parsed.v, parsed.entries, items, document)


def gather(events: Iterable[LeaseEvent]) -> Iterator[Gathered]:
    """Consecutive events put together again as they are stored: ``expand`` gives them back one by one."""
    group: Gathered | None = None
    moment: datetime | None = None
    run: list[LeaseEvent] = []
    said: object = None
    for event in events:
        if group is None or event.timestamp != moment or event.schema_version != group.version:
            if group is not None:
                _add(group, run)
                yield group
            moment = event.timestamp
            group = Gathered(event.sequence_number, 0, to_micros(moment), event.schema_version, [], [])
            run = []
        says = _shared(event)
        if not run or says != said or not _goes_on(run, event):
            if run:
                _add(group, run)
            run, said = [], says
        run.append(event)
    if group is not None:
        _add(group, run)
        yield group


_WITH_WHOLE_ITEM = frozenset((EventType.ENQUEUED, EventType.RESTORED))
_WITHOUT_ITEM = frozenset((EventType.HEARTBEAT, EventType.BACKPRESSURE_CHANGED))
_WITH_NAME = frozenset(EventType) - _WITH_WHOLE_ITEM - _WITHOUT_ITEM


_shared = attrgetter(
    "type", "peer_id", "expires_at", "available_at", "attempt", "result", "error", "requeued", "principal",
    "enqueued_at", "metadata", "errors",
)  # fmt: skip
"""What is the same in all events of an entry."""


def _goes_on(run: list[LeaseEvent], event: LeaseEvent) -> bool:
    """Whether ``event``, which says the same as those in ``run``, is about the item after theirs."""
    before = run[-1]
    if (
        before.sequence_id is None
        or event.sequence_id != before.sequence_id + 1
        or event.type not in _KNOWN
        or (event.item is None) != (before.item is None)
    ):
        return False
    one, other = before.token, event.token
    if one is None or other is None:
        if one is not other:
            return False
    elif other.fence != one.fence + 1 or other.lease_id != one.lease_id or other.attempt != one.attempt:
        return False
    return len(run) == 1 or (
        event.pending - before.pending == run[1].pending - run[0].pending
        and event.active - before.active == run[1].active - run[0].active
    )


def _add(group: Gathered, run: list[LeaseEvent]) -> None:
    """Add events that differ in nothing but their items, one after the other, as one entry."""
    entry = _entry(run[0])
    entry.n = len(run)
    if len(run) > 1:  # depth is kept as it was before the first event, with the step that each one makes
        entry.pending_step = run[1].pending - entry.pending
        entry.active_step = run[1].active - entry.active
        entry.pending -= entry.pending_step
        entry.active -= entry.active_step
    items = [event.item for event in run if event.item is not None]
    if items and entry.type in _WITH_NAME:
        name_entry(entry, [(item.resource_type, item.resource_id, item.partition_key) for item in items])
        items = []
    elif items:
        entry.items = [raw(item) for item in items]
    group.entries.append(entry)
    group.items.append(items)
    group.last = run[-1].sequence_number


def _entry(event: LeaseEvent) -> Entry:
    """The event as an entry of its own, still without its item."""
    token, used = event.token, event.attempt
    return Entry(
        event.type,
        id=event.sequence_id,
        pending=event.pending,
        active=event.active,
        peer=event.peer_id,
        principal=event.principal,
        attempt=token.attempt if token else used,
        used=used if token and used != token.attempt else None,
        lease=token.lease_id if token else None,
        fence=(token.fence or None) if token else None,
        expires_at=_micros(event.expires_at),
        available_at=_micros(event.available_at),
        enqueued_at=_micros(event.enqueued_at),
        requeued=event.requeued,
        error=event.error,
        errors=event.errors,
        result=msgspec.UNSET if event.result is None else msgspec.Raw(_encoder.encode(event.result)),
        metadata=event.metadata,
    )


def _micros(moment: datetime | None) -> int | None:
    return None if moment is None else to_micros(moment)


def _event(namespace: str, number: int, at: Any, version: int, entry: Entry, index: int) -> LeaseEvent:
    step = index + 1
    sequence_id = None if entry.id is None else entry.id + index
    token = None
    if entry.lease is not None and sequence_id is not None:
        fence = number if entry.type == EventType.LEASE_GRANTED else (entry.fence or 0) + index
        token = LeaseToken(sequence_id, entry.attempt or 0, entry.lease, fence)
    return LeaseEvent(
        namespace=namespace,
        sequence_number=number,
        type=entry.type,
        timestamp=at,
        sequence_id=sequence_id,
        token=token,
        item=_item(entry, index),
        error=entry.error,
        errors=entry.errors,
        peer_id=entry.peer,
        principal=entry.principal,
        result=None if entry.result is msgspec.UNSET else msgspec.json.decode(entry.result),
        pending=entry.pending + entry.pending_step * step,
        active=entry.active + entry.active_step * step,
        expires_at=_moment(entry.expires_at),
        available_at=_moment(entry.available_at),
        enqueued_at=_moment(entry.enqueued_at),
        requeued=entry.requeued,
        attempt=entry.attempt if entry.used is None else entry.used,
        metadata=entry.metadata,
        schema_version=version,
    )


def _item(entry: Entry, index: int) -> WorkItem | None:
    if entry.items is not None:
        return _item_decoder.decode(entry.items[index])
    if entry.resource_type is None or entry.resource_id is None:
        return None
    return WorkItem(
        _pick(entry.resource_type, index), _pick(entry.resource_id, index), _pick(entry.partition_key, index)
    )


def _pick(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) else value


def _moment(micros: int | None) -> Any:
    return None if micros is None else to_datetime(micros)
