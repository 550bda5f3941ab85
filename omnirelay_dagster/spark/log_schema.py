"""The columns of the log as Spark sees it: one row an event, every field of ``LeaseEvent``.

``COLUMNS`` is the one place that says what there is; docs/spark-log-source.md shows the same table.
"""

from __future__ import annotations

from typing import NamedTuple

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lease_core.errors import InvalidInput


class Column(NamedTuple):
    name: str
    type: DataType
    meaning: str


_STRING, _LONG, _INT, _MOMENT = StringType(), LongType(), IntegerType(), TimestampType()
_MAP = MapType(_STRING, _STRING)
_ERRORS = ArrayType(StructType().add("attempt", _INT).add("at", _MOMENT).add("error", _STRING).add("peer_id", _STRING))

COLUMNS = (
    Column("namespace", _STRING, "the queue"),
    Column("sequence_number", _LONG, "the event's number: dense, in commit order"),
    Column("type", _STRING, "what happened: Enqueued, LeaseGranted, Completed and so on"),
    Column("timestamp", _MOMENT, "when, on the database's clock"),
    Column("sequence_id", _LONG, "the item; null for events of the queue itself"),
    Column("token_attempt", _INT, "the lease's attempt; null where no lease is meant"),
    Column("token_lease_id", _STRING, "the lease; null where no lease is meant"),
    Column("token_fence", _LONG, "the number of the grant; null where no lease is meant"),
    Column("resource_type", _STRING, "the item's resource type; null in heartbeats and events of the queue itself"),
    Column("resource_id", _STRING, "the item's resource id; null likewise"),
    Column("partition_key", _STRING, "the item's partition key, if it has one"),
    Column("peer_id", _STRING, "who acted or, where nobody is named, the holder"),
    Column("principal", _STRING, "under which identity"),
    Column("error", _STRING, "of Failed and Expired: why; of Restored: the item's last error"),
    Column("errors", _ERRORS, "the history that a Restored item brought along; empty otherwise"),
    Column("result", _STRING, "of Completed: the result, as JSON text"),
    Column("pending", _LONG, "items waiting, right after the event"),
    Column("active", _LONG, "items leased, right after the event"),
    Column("expires_at", _MOMENT, "of LeaseGranted and Heartbeat: when the lease ends"),
    Column("available_at", _MOMENT, "from when on the item can be leased; null in Enqueued: at once"),
    Column("enqueued_at", _MOMENT, "of Restored: when the item first came in"),
    Column("requeued", BooleanType(), "of Failed, Expired and Restored: pending again (true) or dead (false)"),
    Column("attempt", _INT, "attempts that the item has used up"),
    Column("metadata", _MAP, "further facts, such as the origin of a Restored item"),
    Column("schema_version", _INT, "of the document that the event was written in"),
)
ITEM_COLUMNS = (
    Column("attributes", _MAP, "the item's attributes"),
    Column("body", BinaryType(), "the item's body"),
    Column("payload_encoding", _STRING, "how the body is encoded"),
    Column("request_id", _STRING, "the item's dedupe key"),
    Column("priority", _LONG, "the item's priority"),
    Column("not_before", _MOMENT, "the item's earliest time"),
)
"""Null but in Enqueued and Restored, which alone carry the whole item; read with ``include_items`` only."""

_BY_NAME = {column.name: column for column in (*COLUMNS, *ITEM_COLUMNS)}


def table_schema(include_items: bool = False, columns: list[str] | None = None) -> StructType:
    """The schema of a read: everything, everything with items, or just the columns asked for, in that order."""
    if columns is None:
        chosen = [*COLUMNS, *ITEM_COLUMNS] if include_items else [*COLUMNS]
    else:
        chosen = [_named(name) for name in columns]
    if len({column.name for column in chosen}) < len(chosen):
        raise InvalidInput("columns", "names a column twice")
    return StructType([StructField(column.name, column.type) for column in chosen])


def _named(name: str) -> Column:
    if name not in _BY_NAME:
        raise InvalidInput("columns", f"there is no column {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def check_schema(given: StructType) -> None:
    """Refuse a schema given by the user (``.schema(...)``) that asks for what the log does not have."""
    for field in given.fields:
        expected = table_schema(columns=[field.name])[field.name].dataType
        if field.dataType != expected:
            raise InvalidInput(
                "schema", f"{field.name} is {expected.simpleString()}, not {field.dataType.simpleString()}"
            )
