"""Documents of the log to Arrow rows, an event each, without a Python object for each.

A document says in one entry what happened to ``n`` neighbours (``lease_core.log``). Entries are gathered from many
documents; then each column is made in one go: one value for each entry, repeated by index, plus arithmetic where
neighbours differ by a step. Only names and items, which really are one for each event, are lists of that length.

What is not asked for is neither decoded nor made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from lease_core.log import Entry
from lease_core.model import EventType, WorkItem

MOST_ROWS = 32_768
MOST_BYTES = 32 * 1024 * 1024
"""About how large a batch may get. An error or a result is written once for many events, and repeated here."""


class LogDocument(NamedTuple):
    """One row of the log. ``body`` is None if the document was left out by a filter."""

    first: int
    last: int
    body: Any


class _Name(msgspec.Struct, rename="camel", gc=False):
    resource_type: str
    resource_id: str
    partition_key: str | None = None


class _BareEntry(Entry):
    """An entry of whose items not even the names are wanted."""

    items: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    resource_type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    resource_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]
    partition_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET  # type: ignore[assignment]


class _NamedEntry(Entry):
    """An entry of whose items the names are wanted; bodies and attributes are skipped over."""

    items: list[_Name] | None = None  # type: ignore[assignment]


class _WholeEntry(Entry):
    items: list[WorkItem] | None = None  # type: ignore[assignment]


class _BareDocument(msgspec.Struct):
    v: int
    at: int
    entries: list[_BareEntry]


class _NamedDocument(msgspec.Struct):
    v: int
    at: int
    entries: list[_NamedEntry]


class _WholeDocument(msgspec.Struct):
    v: int
    at: int
    entries: list[_WholeEntry]


_NAMES = frozenset({"resource_type", "resource_id", "partition_key"})
_ITEMS = frozenset({"attributes", "body", "payload_encoding", "request_id", "priority", "not_before"})


def _decoder(columns: Collection[str]) -> msgspec.json.Decoder[Any]:
    if _ITEMS.intersection(columns):
        return msgspec.json.Decoder(_WholeDocument)
    return msgspec.json.Decoder(_NamedDocument if _NAMES.intersection(columns) else _BareDocument)


def to_batches(
    documents: Iterable[LogDocument],
    namespace: str,
    lowest: int,
    highest: int,
    schema: pa.Schema,
    types: Collection[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The events numbered ``lowest`` to ``highest`` as record batches of ``schema``; of these ``types`` only, if given.

    Documents come in order and may reach beyond the range at both ends.
    """
    decode = _decoder(schema.names).decode
    chunk = Chunk(namespace)
    for first, last, body in documents:
        if body is None:
            continue
        parsed = decode(body)
        average = len(body) // (last - first + 1)
        number = first
        for entry in parsed.entries:
            skip = max(0, lowest - number)
            stop = min(entry.n, highest - number + 1)
            if types is not None and entry.type not in types:
                skip = stop
            while skip < stop:
                skip += chunk.add(entry, parsed.at, parsed.v, number, skip, stop - skip, average)
                if chunk.full:
                    yield chunk.to_batch(schema)
                    chunk = Chunk(namespace)
            number += entry.n
    if chunk.rows:
        yield chunk.to_batch(schema)


class Chunk:
    """Entries to be turned into rows together: of each, the events from ``skips`` on, as many as ``counts`` says."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.entries: list[Any] = []
        self.ats: list[int] = []
        self.versions: list[int] = []
        self.numbers: list[int] = []
        self.skips: list[int] = []
        self.counts: list[int] = []
        self.rows = 0
        self._bytes = 0

    @property
    def full(self) -> bool:
        return self.rows >= MOST_ROWS or self._bytes >= MOST_BYTES

    def add(self, entry: Any, at: int, version: int, number: int, skip: int, count: int, average: int) -> int:
        """Take in up to ``count`` events of the entry whose first is ``number``. Gives how many fitted: at least one.

        ``average`` is what an event of the document takes up in it.
        """
        weight = 200 + average + len(entry.error or "")
        if entry.result is not msgspec.UNSET:
            weight += len(bytes(entry.result))
        taken = max(1, min(count, MOST_ROWS - self.rows, (MOST_BYTES - self._bytes) // weight))
        self.entries.append(entry)
        self.ats.append(at)
        self.versions.append(version)
        self.numbers.append(number)
        self.skips.append(skip)
        self.counts.append(taken)
        self.rows += taken
        self._bytes += taken * weight
        return taken

    def to_batch(self, schema: pa.Schema) -> pa.RecordBatch:
        arrays = [_MAKERS[field.name](self, field.type) for field in schema]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    # what a row is made from: the place of its entry, and its own place within that entry

    @cached_property
    def _places(self) -> Any:
        return np.repeat(np.arange(len(self.entries)), self.counts)

    @cached_property
    def _indices(self) -> Any:
        counts = np.asarray(self.counts)
        begins = np.cumsum(counts) - counts
        return np.arange(self.rows) - np.repeat(begins - np.asarray(self.skips), counts)

    @cached_property
    def sequence_numbers(self) -> Any:
        return np.asarray(self.numbers, np.int64)[self._places] + self._indices

    def repeated(self, values: list[Any], kind: pa.DataType) -> pa.Array:
        """One value for each entry, for all of its events."""
        first = values[0]
        if first is None and not any(value is not None for value in values):
            return pa.nulls(self.rows, kind)
        made = pa.array(values, kind)
        return made if self.rows == len(values) else made.take(pa.array(self._places))

    def field(self, name: str, kind: pa.DataType) -> pa.Array:
        return self.repeated([getattr(entry, name) for entry in self.entries], kind)

    def stepping(self, name: str, step: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
        """A number for each event, and where there is none: the entry's, one higher with each event or by ``step``."""
        values = [getattr(entry, name) for entry in self.entries]
        base = np.fromiter((value or 0 for value in values), np.int64, len(values))[self._places]
        missing = np.fromiter((value is None for value in values), np.bool_, len(values))[self._places]
        return base + (self._indices if step is None else step(self._indices)), missing

    def depth(self, name: str) -> Any:
        steps = np.fromiter((getattr(entry, f"{name}_step") for entry in self.entries), np.int64, len(self.entries))
        values, _ = self.stepping(name, lambda indices: steps[self._places] * (indices + 1))
        return values

    @cached_property
    def names(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Resource types, resource ids and partition keys, one for each event."""
        types: list[Any] = []
        ids: list[Any] = []
        partitions: list[Any] = []
        for entry, skip, count in zip(self.entries, self.skips, self.counts, strict=True):
            if entry.items is not None:
                part = entry.items[skip : skip + count]
                types += [item.resource_type for item in part]
                ids += [item.resource_id for item in part]
                partitions += [item.partition_key for item in part]
            elif entry.resource_type is None or entry.resource_id is None:
                for column in (types, ids, partitions):
                    column += [None] * count
            else:
                types += _cut(entry.resource_type, skip, count)
                ids += _cut(entry.resource_id, skip, count)
                partitions += _cut(entry.partition_key, skip, count)
        return types, ids, partitions

    @cached_property
    def items(self) -> list[WorkItem | None]:
        """The whole item of each event that carries one."""
        items: list[WorkItem | None] = []
        for entry, skip, count in zip(self.entries, self.skips, self.counts, strict=True):
            items += [None] * count if entry.items is None else entry.items[skip : skip + count]
        return items

    def of_items(self, kind: pa.DataType, take: Callable[[WorkItem], Any]) -> pa.Array:
        return pa.array([None if item is None else take(item) for item in self.items], kind)


def _cut(value: Any, skip: int, count: int) -> list[Any]:
    return value[skip : skip + count] if isinstance(value, list) else [value] * count


Maker = Callable[[Chunk, pa.DataType], pa.Array]


def _field(name: str) -> Maker:
    return lambda chunk, kind: chunk.field(name, kind)


def _sequence_id(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    values, missing = chunk.stepping("id")
    return pa.array(values, kind, mask=missing)


def _holds(entry: Any) -> bool:
    """Whether the entry's events have a token."""
    return entry.lease is not None and entry.id is not None


def _token_attempt(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    return chunk.repeated([(e.attempt or 0) if _holds(e) else None for e in chunk.entries], kind)


def _token_lease_id(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    return chunk.repeated([e.lease if _holds(e) else None for e in chunk.entries], kind)


def _token_fence(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    fences, _ = chunk.stepping("fence")
    granted = _flags(chunk, lambda entry: entry.type == EventType.LEASE_GRANTED)
    return pa.array(
        np.where(granted, chunk.sequence_numbers, fences), kind, mask=_flags(chunk, lambda entry: not _holds(entry))
    )


def _flags(chunk: Chunk, test: Callable[[Any], bool]) -> Any:
    return np.fromiter(map(test, chunk.entries), np.bool_, len(chunk.entries))[chunk._places]


def _result(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    texts = [None if e.result is msgspec.UNSET else bytes(e.result).decode() for e in chunk.entries]
    return chunk.repeated(texts, kind)


def _errors(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    if not any(entry.errors for entry in chunk.entries):
        return _empty_lists(chunk.rows, kind)
    return chunk.repeated(
        [
            [{"attempt": e.attempt, "at": e.at, "error": e.error, "peer_id": e.peer_id} for e in entry.errors]
            for entry in chunk.entries
        ],
        kind,
    )


def _metadata(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    if not any(entry.metadata for entry in chunk.entries):
        return _empty_lists(chunk.rows, kind)
    return chunk.repeated([list(entry.metadata.items()) for entry in chunk.entries], kind)


def _empty_lists(count: int, kind: pa.DataType) -> pa.Array:
    """``count`` empty lists or maps: nothing but offsets, all zero."""
    offsets = pa.array(np.zeros(count + 1, np.int32))
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(offsets, pa.array([], kind.key_type), pa.array([], kind.item_type)).cast(kind)
    return pa.ListArray.from_arrays(offsets, pa.array([], kind.value_type)).cast(kind)


def _attempt(chunk: Chunk, kind: pa.DataType) -> pa.Array:
    return chunk.repeated([e.attempt if e.used is None else e.used for e in chunk.entries], kind)


def _name(place: int) -> Maker:
    return lambda chunk, kind: pa.array(chunk.names[place], kind)


def _of_item(take: Callable[[WorkItem], Any]) -> Maker:
    return lambda chunk, kind: chunk.of_items(kind, take)


_MAKERS: dict[str, Maker] = {
    "namespace": lambda chunk, kind: pa.repeat(pa.scalar(chunk.namespace, kind), chunk.rows),
    "sequence_number": lambda chunk, kind: pa.array(chunk.sequence_numbers, kind),
    "type": _field("type"),
    "timestamp": lambda chunk, kind: chunk.repeated(chunk.ats, kind),
    "sequence_id": _sequence_id,
    "token_attempt": _token_attempt,
    "token_lease_id": _token_lease_id,
    "token_fence": _token_fence,
    "resource_type": _name(0),
    "resource_id": _name(1),
    "partition_key": _name(2),
    "peer_id": _field("peer"),
    "principal": _field("principal"),
    "error": _field("error"),
    "errors": _errors,
    "result": _result,
    "pending": lambda chunk, kind: pa.array(chunk.depth("pending"), kind),
    "active": lambda chunk, kind: pa.array(chunk.depth("active"), kind),
    "expires_at": _field("expires_at"),
    "available_at": _field("available_at"),
    "enqueued_at": _field("enqueued_at"),
    "requeued": _field("requeued"),
    "attempt": _attempt,
    "metadata": _metadata,
    "schema_version": lambda chunk, kind: chunk.repeated(chunk.versions, kind),
    "attributes": _of_item(lambda item: list(item.attributes.items())),
    "body": _of_item(lambda item: item.body),
    "payload_encoding": _of_item(lambda item: item.payload_encoding),
    "request_id": _of_item(lambda item: item.request_id),
    "priority": _of_item(lambda item: item.priority),
    "not_before": _of_item(lambda item: item.not_before),
}
