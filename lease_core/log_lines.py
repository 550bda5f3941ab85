"""The log straight to its wire form: the bytes that encoding each expanded event would give, several times faster.

An entry stands for many events that differ in a few numbers and in the item's name. So what they share is encoded once,
as a pattern, and each event is that pattern filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from lease_core.log import Document, Entry
from lease_core.model import EventType, to_datetime

_decoder = msgspec.json.Decoder(Document)
_encode = msgspec.json.Encoder().encode


def lines(namespace: str, first: int, document: bytes, after: int = 0) -> Iterator[bytes]:
    """The events of one document whose numbers begin at ``first``, as JSON, leaving out those up to ``after``."""
    parsed = _decoder.decode(document)
    at = to_datetime(parsed.at)
    number = first
    for entry in parsed.entries:
        begin = max(0, after + 1 - number)
        if begin < entry.n:
            yield from _entry_lines(namespace, number, at, parsed.v, entry, begin)
        number += entry.n


def _entry_lines(namespace: str, number: int, at: datetime, version: int, entry: Entry, begin: int) -> Iterator[bytes]:
    leased = entry.lease is not None and entry.id is not None
    granted = entry.type == EventType.LEASE_GRANTED
    pattern = _pattern(namespace, at, version, entry)
    item = _items(entry)
    pending, pending_step, active, active_step = entry.pending, entry.pending_step, entry.active, entry.active_step
    for index in range(begin, entry.n):
        step = index + 1
        depth = _depth(pending + pending_step * step, active + active_step * step)
        if entry.id is None:
            yield pattern % (number + index, item(index), depth)
        elif not leased:
            yield pattern % (number + index, entry.id + index, item(index), depth)
        else:
            sequence_id = entry.id + index
            fence = number + index if granted else (entry.fence or 0) + index
            yield pattern % (number + index, sequence_id, sequence_id, fence, item(index), depth)


def _pattern(namespace: str, at: datetime, version: int, entry: Entry) -> bytes:
    """What all events of the entry share, in the order of the fields, with a place for what they don't."""
    fixed = _escaped(b'{"namespace":' + _encode(namespace) + b',"sequenceNumber":') + b"%d"
    fixed += _escaped(b',"type":' + _encode(entry.type) + b',"timestamp":' + _encode(at))
    if entry.id is not None:
        fixed += b',"sequenceId":%d'
        if entry.lease is not None:
            fixed += b',"token":{"sequenceId":%d,' + _escaped(
                b'"attempt":%d,"leaseId":%b,"fence":' % (entry.attempt or 0, _encode(entry.lease))
            )
            fixed += b"%d}"
    result = None if entry.result is msgspec.UNSET else msgspec.json.decode(entry.result)
    told = _fields(error=entry.error, peerId=entry.peer, principal=entry.principal, result=result)
    rest = _fields(
        expiresAt=_moment(entry.expires_at),
        availableAt=_moment(entry.available_at),
        enqueuedAt=_moment(entry.enqueued_at),
        requeued=entry.requeued,
        attempt=entry.attempt if entry.used is None else entry.used,
        errors=entry.errors or None,
        metadata=entry.metadata or None,
        schemaVersion=version,
    )
    return fixed + b"%b" + _escaped(told) + b"%b" + _escaped(rest) + b"}"


def _fields(**values: Any) -> bytes:
    return b"".join(
        b',"%b":%b' % (name.encode(), _encode(value)) for name, value in values.items() if value is not None
    )


def _escaped(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


def _depth(pending: int, active: int) -> bytes:
    if pending:
        return b',"pending":%d,"active":%d' % (pending, active) if active else b',"pending":%d' % pending
    return b',"active":%d' % active if active else b""


def _items(entry: Entry) -> Callable[[int], bytes]:
    """Gives the item of each event, as a field; nothing, where the entry has none."""
    if entry.items is not None:
        whole = entry.items
        return lambda index: b',"item":%b' % bytes(whole[index])
    if entry.resource_type is None or entry.resource_id is None:
        return lambda index: b""
    kind, name, key = (_texts(each) for each in (entry.resource_type, entry.resource_id, entry.partition_key))
    if isinstance(kind, bytes) and isinstance(key, bytes) and isinstance(name, list):  # what a batch mostly is
        front = b',"item":{"resourceType":' + kind + b',"resourceId":'
        back = (b',"partitionKey":' + key if key else b"") + b"}"
        return lambda index: front + name[index] + back
    return lambda index: _item(_pick(kind, index), _pick(name, index), _pick(key, index))


def _item(kind: bytes, name: bytes, key: bytes) -> bytes:
    partition = b',"partitionKey":' + key if key else b""
    return b',"item":{"resourceType":' + kind + b',"resourceId":' + name + partition + b"}"


def _texts(value: Any) -> bytes | list[bytes]:
    if isinstance(value, list):
        return [b"" if each is None else _encode(each) for each in value]
    return b"" if value is None else _encode(value)


def _pick(value: bytes | list[bytes], index: int) -> bytes:
    return value[index] if isinstance(value, list) else value


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else to_datetime(micros)
