"""The log straight to its wire form: the bytes that encoding each expanded event would give, several times faster.

An entry stands for many events that differ in a few numbers and in the item's name. So the events of an entry are laid
out as a table of columns, most of which have the same bytes in every row. What they share is encoded once, numbers that
follow each other are encoded together, and the table is joined in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from lease_core.log import Document, Entry
from lease_core.model import EventType, to_datetime

_decoder = msgspec.json.Decoder(Document)
_encode = msgspec.json.Encoder().encode

Piece = bytes | msgspec.Raw
Column = bytes | Sequence[Piece]
"""The same bytes for every event, or those of each."""


def lines(namespace: str, first: int, document: bytes, after: int = 0) -> list[str]:
    """The events of one document whose numbers begin at ``first``, as JSON, leaving out those up to ``after``."""
    found, _ = pieces(namespace, first, document, after)
    return b"".join(found).decode().split("\n")[:-1]


def pieces(
    namespace: str, first: int, document: bytes, after: int = 0, most: int | None = None
) -> tuple[list[Piece], int]:
    """The same, ``most`` events of it at most, each ended by a line break: in pieces to be joined, and how many."""
    parsed = _decoder.decode(document)
    at = to_datetime(parsed.at)
    number, count = first, 0
    found: list[Piece] = []
    for entry in parsed.entries:
        begin = max(0, after + 1 - number)
        end = entry.n if most is None else min(entry.n, begin + most - count)
        if begin < end:
            found += _laid_out(_columns(namespace, number, at, parsed.v, entry, begin, end), end - begin)
            count += end - begin
        number += entry.n
    return found, count


def _laid_out(columns: list[Column], n: int) -> list[Piece]:
    """The columns as ``n`` rows, row after row."""
    merged: list[Column] = []
    for column in columns:
        if isinstance(column, bytes) and merged and isinstance(merged[-1], bytes):
            merged[-1] += column
        else:
            merged.append(column)
    width = len(merged)
    table: list[Piece] = [b""] * (width * n)
    for place, column in enumerate(merged):
        table[place::width] = [column] * n if isinstance(column, bytes) else column
    return table


def _columns(
    namespace: str, number: int, at: datetime, version: int, entry: Entry, begin: int, end: int
) -> list[Column]:
    """The events of one entry from the one at ``begin`` to the one before ``end``."""
    numbers = _numbers(range(number + begin, number + end))
    columns: list[Column] = [b'{"namespace":' + _encode(namespace) + b',"sequenceNumber":', numbers]
    columns.append(b',"type":' + _encode(entry.type) + b',"timestamp":' + _encode(at))
    if entry.id is not None:
        ids = _numbers(range(entry.id + begin, entry.id + end))
        columns += (b',"sequenceId":', ids)
        if entry.lease is not None:
            granted = entry.fence or 0
            own = entry.type == EventType.LEASE_GRANTED
            proof = b',"attempt":%d,"leaseId":%b,"fence":' % (entry.attempt or 0, _encode(entry.lease))
            fences = numbers if own else _numbers(range(granted + begin, granted + end))
            columns += (b',"token":{"sequenceId":', ids, proof, fences, b"}")
    columns += _item(entry, begin, end)
    result = None if entry.result is msgspec.UNSET else msgspec.json.decode(entry.result)
    columns.append(_fields(error=entry.error, peerId=entry.peer, principal=entry.principal, result=result))
    columns += _depth(b',"pending":', entry.pending, entry.pending_step, begin, end)
    columns += _depth(b',"active":', entry.active, entry.active_step, begin, end)
    columns.append(_rest(entry, version))
    return columns


def _rest(entry: Entry, version: int) -> bytes:
    fields = _fields(
        expiresAt=_moment(entry.expires_at),
        availableAt=_moment(entry.available_at),
        enqueuedAt=_moment(entry.enqueued_at),
        requeued=entry.requeued,
        attempt=entry.attempt if entry.used is None else entry.used,
        errors=entry.errors or None,
        metadata=entry.metadata or None,
        schemaVersion=version,
    )
    return fields + b"}\n"


def _depth(field: bytes, before: int, step: int, begin: int, end: int) -> list[Column]:
    """The queue's depth after each event; a depth of 0 is left out."""
    if not step:
        return [field + str(before).encode()] if before else []
    depths = range(before + step * (begin + 1), before + step * (end + 1), step)
    values = _numbers(depths)
    if 0 not in depths:
        return [field, values]
    fields = [field] * len(values)
    fields[depths.index(0)] = values[depths.index(0)] = b""
    return [fields, values]


def _item(entry: Entry, begin: int, end: int) -> list[Column]:
    """The item of each event, as a field; nothing, where the entry has none."""
    if entry.items is not None:
        return [b',"item":', entry.items[begin:end]]
    if entry.resource_type is None or entry.resource_id is None:
        return []
    return [
        *_texts(b',"item":{"resourceType":', entry.resource_type, begin, end),
        *_texts(b',"resourceId":', entry.resource_id, begin, end),
        *_texts(b',"partitionKey":', entry.partition_key, begin, end),
        b"}",
    ]


def _texts(field: bytes, value: Any, begin: int, end: int) -> list[Column]:
    if not isinstance(value, list):
        return [] if value is None else [field + _encode(value)]
    values = value[begin:end]
    if None in values:
        return [[b"" if each is None else field + _encode(each) for each in values]]
    return [field, list(map(_encode, values))]


def _numbers(values: range) -> list[bytes]:
    return _encode(list(values))[1:-1].split(b",")


def _fields(**values: Any) -> bytes:
    return b"".join(
        b',"%b":%b' % (name.encode(), _encode(value)) for name, value in values.items() if value is not None
    )


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else to_datetime(micros)
