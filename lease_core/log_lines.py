"""The log straight to its wire form: the bytes that encoding each expanded event would give, several times faster.

An entry stands for many events that differ in a few numbers and in the item's name. So the events of an entry are laid
out as a table of columns, most of which have the same bytes in every row, and the table is joined in one go. Numbers
count up or down by one: their last three digits are taken from a table, and those before them stay the same for long.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

import msgspec

from lease_core.log import Document, Entry
from lease_core.model import EventType, to_datetime


class _Entry(Entry):
    """An entry whose names stay as they are written: they go to the wire as they are."""

    resource_type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    resource_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    partition_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]


class _Document(Document):
    entries: list[_Entry]  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(_Document)
_encode = msgspec.json.Encoder().encode

Piece = bytes | msgspec.Raw


class Depths(NamedTuple):
    """A field with numbers that go up or down by one, none of them below 0; a 0 is left out with its field."""

    field: bytes
    numbers: range


Column = bytes | Sequence[Piece] | range | Depths
"""The same bytes for every event, those of each, or numbers that go up or down by one."""

_DIGITS = [b"%d" % number for number in range(1_000)]
_LAST_DIGITS = [b"%03d" % number for number in range(1_000)]


def lines(namespace: str, first: int, document: bytes, after: int = 0) -> list[str]:
    """The events of one document whose numbers begin at ``first``, as JSON, leaving out those up to ``after``."""
    found, _ = pieces(namespace, first, document, after)
    return b"".join(found).decode().split("\n")[:-1]


def pieces(
    namespace: str, first: int, document: bytes, after: int = 0, most: int | None = None
) -> tuple[list[bytes], int]:
    """The same, ``most`` events of it at most, each ended by a line break: in pieces to be joined, and how many."""
    parsed = _decoder.decode(document)
    at = _encode(to_datetime(parsed.at))
    number, count = first, 0
    found: list[bytes] = []
    for entry in parsed.entries:
        begin = max(0, after + 1 - number)
        end = entry.n if most is None else min(entry.n, begin + most - count)
        if begin < end:
            found += _laid_out(_columns(namespace, number, at, parsed.v, entry, begin, end), end - begin)
            count += end - begin
        number += entry.n
    return found, count


def _laid_out(columns: list[Column], n: int) -> list[bytes]:
    """The columns as ``n`` rows, row after row: by runs in which only the last three digits of any number change."""
    found: list[bytes] = []
    counting = [column for column in columns if isinstance(column, (range, Depths))]
    start = 0
    while start < n:
        end = min([n, *(start + _alike(column, start) for column in counting)])
        found += _joined([part for column in columns for part in _run(column, start, end)], end - start)
        start = end
    return found


def _joined(parts: list[bytes | Sequence[Piece]], n: int) -> tuple[bytes, ...]:
    """Rows of parts that are the same in each or that each has one of.

    The end of a row and the beginning of the next are one piece: what this takes, it takes by the piece.
    """
    head, row = b"", [b""]
    varying: list[tuple[int, Sequence[Piece]]] = []
    for part in parts:
        if isinstance(part, bytes):
            row[-1] += part
            continue
        if not varying:
            head = row.pop()
        elif not row[-1]:
            row.pop()
        varying.append((len(row), part))
        row += (b"", b"")
    if not varying:
        return (row[0] * n,)
    tail = row[-1]
    row[-1] += head
    table: list[Piece] = row * n
    for place, part in varying:
        table[place :: len(row)] = part
    table[-1] = tail
    return head, b"".join(table)


def _alike(column: range | Depths, start: int) -> int:
    """How many numbers from this one on differ in their last three digits only. A depth of 0 is like no other."""
    if isinstance(column, range):
        return 1_000 - column[start] % 1_000
    number = column.numbers[start]
    if number == 0:
        return 1
    if column.numbers.step > 0:
        return 1_000 - number % 1_000
    return number if number < 1_000 else number % 1_000 + 1


def _run(column: Column, start: int, end: int) -> Sequence[bytes | Sequence[Piece]]:
    """Some rows of a column, as one or more."""
    if isinstance(column, bytes):
        return (column,)
    if isinstance(column, Depths):
        number = column.numbers[start]
        if 0 < number < 1_000:
            return (_span(_depths(column.field), column.numbers, start, end),)
        return (column.field, *_run(column.numbers, start, end)) if number else ()
    if not isinstance(column, range):
        return (column[start:end],)
    number = column[start]
    if number < 1_000:
        return (_span(_DIGITS, column, start, end),)
    return b"%d" % (number // 1_000), _span(_LAST_DIGITS, column, start, end)


def _span(written: list[bytes], numbers: range, start: int, end: int) -> list[bytes]:
    """What is written for some numbers, of which the last three digits say where it is."""
    first, step = numbers[start] % 1_000, numbers.step
    stop = first + step * (end - start)
    return written[first : None if stop < 0 else stop : step]


@cache
def _depths(field: bytes) -> list[bytes]:
    return [field + digits for digits in _DIGITS]


def _columns(namespace: str, number: int, at: bytes, version: int, entry: _Entry, begin: int, end: int) -> list[Column]:
    """The events of one entry from the one at ``begin`` to the one before ``end``."""
    numbers = range(number + begin, number + end)
    columns: list[Column] = [b'{"namespace":' + _encode(namespace) + b',"sequenceNumber":', numbers]
    columns.append(b',"type":' + _encode(entry.type) + b',"timestamp":' + at)
    if entry.id is not None:
        ids = range(entry.id + begin, entry.id + end)
        columns += (b',"sequenceId":', ids)
        if entry.lease is not None:
            granted = entry.fence or 0
            own = entry.type == EventType.LEASE_GRANTED
            proof = b',"attempt":%d,"leaseId":%b,"fence":' % (entry.attempt or 0, _encode(entry.lease))
            fences = numbers if own else range(granted + begin, granted + end)
            columns += (b',"token":{"sequenceId":', ids, proof, fences, b"}")
    columns += _item(entry, begin, end)
    result = None if entry.result is msgspec.UNSET else msgspec.json.decode(entry.result)
    columns.append(
        _field(b',"error":', entry.error)
        + _field(b',"peerId":', entry.peer)
        + _field(b',"principal":', entry.principal)
        + _field(b',"result":', result)
    )
    columns += _depth(b',"pending":', entry.pending, entry.pending_step, begin, end)
    columns += _depth(b',"active":', entry.active, entry.active_step, begin, end)
    columns.append(_rest(entry, version))
    return columns


def _rest(entry: Entry, version: int) -> bytes:
    return b"".join(
        (
            _field(b',"expiresAt":', _moment(entry.expires_at)),
            _field(b',"availableAt":', _moment(entry.available_at)),
            _field(b',"enqueuedAt":', _moment(entry.enqueued_at)),
            _field(b',"requeued":', entry.requeued),
            _field(b',"attempt":', entry.attempt if entry.used is None else entry.used),
            _field(b',"errors":', entry.errors or None),
            _field(b',"metadata":', entry.metadata or None),
            b',"schemaVersion":%d}\n' % version,
        )
    )


def _depth(field: bytes, before: int, step: int, begin: int, end: int) -> list[Column]:
    """The queue's depth after each event; a depth of 0 is left out."""
    if not step:
        return [field + str(before).encode()] if before else []
    depths = range(before + step * (begin + 1), before + step * (end + 1), step)
    if abs(step) == 1 and min(depths[0], depths[-1]) >= 0:
        return [Depths(field, depths)]
    return [[b"%b%d" % (field, depth) if depth else b"" for depth in depths]]


def _item(entry: _Entry, begin: int, end: int) -> list[Column]:
    """The item of each event, as a field; nothing, where the entry has none."""
    if entry.items is not None:
        return [b',"item":', entry.items[begin:end]]
    if entry.resource_type is msgspec.UNSET or entry.resource_id is msgspec.UNSET:
        return []
    return [
        *_texts(b',"item":{"resourceType":', entry.resource_type, entry.n, begin, end),
        *_texts(b',"resourceId":', entry.resource_id, entry.n, begin, end),
        *_texts(b',"partitionKey":', entry.partition_key, entry.n, begin, end),
        b"}",
    ]


def _texts(field: bytes, written: msgspec.Raw | msgspec.UnsetType, n: int, begin: int, end: int) -> list[Column]:
    """Texts of which there is one for all or one for each, in JSON."""
    if written is msgspec.UNSET:
        return []
    text = bytes(written)
    if not text.startswith(b"["):
        return [field + text]
    # with no backslash in it a quotation mark is nothing but the end of a text; a null would make two of them one
    if text.startswith(b'["') and text.endswith(b'"]') and b"\\" not in text:
        found = text[2:-2].split(b'","')
        if len(found) == n:
            return [field + b'"', found[begin:end], b'"']
    values = msgspec.json.decode(text)[begin:end]
    if None in values:
        return [[b"" if each is None else field + _encode(each) for each in values]]
    return [field, list(map(_encode, values))]


def _field(name: bytes, value: Any) -> bytes:
    return b"" if value is None else name + _encode(value)


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else to_datetime(micros)
