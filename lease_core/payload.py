"""Work items as rows of the item table, and back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

import msgspec

from lease_core.log import Name, raw
from lease_core.model import ErrorRecord, WorkItem, to_datetime
from lease_core.store.base import Row


class _Extra(msgspec.Struct, omit_defaults=True):
    """The fields most items leave empty, together in one column."""

    attributes: dict[str, str] = {}
    payload_encoding: str | None = None
    not_before: datetime | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Extra)


class Prepared(NamedTuple):
    """An item as it will be stored and logged, made ready before anybody has to wait for it."""

    item: WorkItem
    json: msgspec.Raw
    columns: Row


def prepare(item: WorkItem) -> Prepared:
    return Prepared(item, raw(item), to_row(0, 0, item)[2:])


def to_row(sequence_id: int, enqueued_at: int, item: WorkItem) -> Row:
    extra = None
    if item.attributes or item.payload_encoding is not None or item.not_before is not None:
        extra = _encoder.encode(_Extra(item.attributes, item.payload_encoding, item.not_before)).decode()
    return (
        sequence_id,
        enqueued_at,
        item.resource_type,
        item.resource_id,
        item.partition_key,
        item.request_id,
        extra,
        item.body or None,
    )


def to_item(row: Row, priority: int) -> WorkItem:
    """The item of a row with ``selects.ITEM_COLUMNS``."""
    _, resource_type, resource_id, partition_key, request_id, extra, body, _ = row
    if extra is None:
        return WorkItem(resource_type, resource_id, partition_key, {}, bytes(body or b""), None, request_id, priority)
    more = _decoder.decode(extra)
    return WorkItem(
        resource_type,
        resource_id,
        partition_key,
        more.attributes,
        bytes(body or b""),
        more.payload_encoding,
        request_id,
        priority,
        more.not_before,
    )


def to_name(row: Row) -> Name:
    return row[1], row[2], row[3]


def exclusive_key(item_type: str, item_id: str, partition: str | None, exclusive: str | None) -> str | None:
    """What items must not be leased at the same time share. None: nothing."""
    if exclusive == "resource":
        return f"{len(item_type)}:{item_type}{item_id}"  # the length keeps ("a", "bc") and ("ab", "c") apart
    if exclusive == "partition":
        return partition
    return None


def errors_by_item(rows: Iterable[Row], ids: Iterable[int]) -> dict[int, list[ErrorRecord]]:
    """Error rows (``selects.ERROR_COLUMNS``) sorted out by the items they concern, oldest first."""
    ordered = sorted(ids)
    found: dict[int, list[ErrorRecord]] = {}
    for first, last, _, _, attempt, at, peer, error in sorted(set(rows), key=lambda row: (row[2], row[3])):
        record = ErrorRecord(attempt, to_datetime(at), error, peer)
        for each in ordered[bisect_left(ordered, first) : bisect_right(ordered, last)]:
            found.setdefault(each, []).append(record)
    return found
