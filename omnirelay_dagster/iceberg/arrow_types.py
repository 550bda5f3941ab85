"""Which parquet columns Iceberg takes as they are, and what the others have to become.

Iceberg's rules for parquet are narrow: instants are in UTC, times are microseconds, integers are signed. pandas, Arrow
and Spark write more than that. Whatever can be turned into an Iceberg type without loss is, by rewriting the file;
nothing is rounded, cut off or wrapped around.
"""

from __future__ import annotations

import pyarrow as pa

from omnirelay_dagster.iceberg.errors import SchemaDrift

INSTANT = pa.timestamp("us", "UTC")
_UTC = ("UTC", "+00:00", "Etc/UTC", "Z")
_PLAIN = {pa.uint8(): pa.int32(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64()}


def wanted_type(found: pa.DataType) -> pa.DataType:
    """The type that stands for ``found`` in an Iceberg table. Equal types need no rewriting."""
    if found in _PLAIN:
        return _PLAIN[found]
    if pa.types.is_float16(found):
        return pa.float32()
    if pa.types.is_timestamp(found):
        return _timestamp(found)
    if pa.types.is_time(found):
        return pa.time64("us")
    if pa.types.is_date64(found):
        return pa.date32()
    return _nested(found)


def _timestamp(found: pa.TimestampType) -> pa.DataType:
    if found.tz is None:
        return pa.timestamp("us")
    return found if found.unit == "us" and found.tz in _UTC[:2] else INSTANT


def _nested(found: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(found):
        return pa.struct([wanted_field(found.field(n)) for n in range(found.num_fields)])
    if pa.types.is_large_list(found):
        return pa.large_list(wanted_field(found.value_field))
    if pa.types.is_fixed_size_list(found):
        return pa.list_(wanted_field(found.value_field), found.list_size)
    if pa.types.is_list(found):
        return pa.list_(wanted_field(found.value_field))
    if pa.types.is_map(found):
        return pa.map_(wanted_field(found.key_field), wanted_field(found.item_field))
    return found


def wanted_field(field: pa.Field) -> pa.Field:
    return field.with_type(wanted_type(field.type))


def wanted_schema(found: pa.Schema, int96: frozenset[str], where: str) -> pa.Schema:
    """The columns as the table should have them. Those of ``int96`` are instants: it is how Spark writes them."""
    fields = []
    for field in found:
        if field.name in int96:
            fields.append(field.with_type(INSTANT))
        elif pa.types.is_duration(field.type) or pa.types.is_interval(field.type):
            raise SchemaDrift(
                f"{where}: column {field.name!r} is a {field.type}, which Iceberg has no type for; store it as a "
                "number, such as its microseconds",
                (field.name,),
            )
        else:
            fields.append(_dense(wanted_field(field)))
    return pa.schema(fields)


def _dense(field: pa.Field) -> pa.Field:
    """A dictionary is a way of storing values, not a type of them."""
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def as_it_is(found: pa.Schema) -> bool:
    """Whether a file with these columns can be part of a table without being rewritten."""
    return all(_accepted(field) for field in found)


def _accepted(field: pa.Field) -> bool:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    # Ids of another table's columns would be taken for ids of this one's
    if field.metadata and b"PARQUET:field_id" in field.metadata:
        return False
    if pa.types.is_null(kind) or wanted_type(kind) != kind:
        return False
    return all(_accepted(each) for each in _children(kind))


def _children(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(kind):
        return [kind.field(n) for n in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return [kind.value_field] if nested else []
