"""Rows by the table's partitions, worked out once for every distinct value and not for every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from lease_core.errors import InvalidInput

if TYPE_CHECKING:
    from pyiceberg.partitioning import PartitionField, PartitionKey
    from pyiceberg.table.metadata import TableMetadata


def split(rows: pa.Table, table: TableMetadata) -> Iterator[tuple[PartitionKey | None, pa.Table]]:
    """The rows of each partition that there are any of."""
    from pyiceberg.partitioning import PartitionFieldValue, PartitionKey

    spec, schema = table.spec(), table.schema()
    if spec.is_unpartitioned():
        yield None, rows
        return
    codes, outcomes = zip(*(_coded(rows, field, table) for field in spec.fields), strict=True)
    names = [f"c{n}" for n in range(len(codes))]
    numbered = pa.table([*codes, pa.array(range(len(rows)))], names=[*names, "row"])
    groups = numbered.group_by(names).aggregate([("row", "list")])
    for group in range(len(groups)):
        values = [
            PartitionFieldValue(field, known[groups[name][group].as_py()])
            for field, name, known in zip(spec.fields, names, outcomes, strict=True)
        ]
        yield PartitionKey(values, spec, schema), rows.take(groups["row_list"][group].values)


def _coded(rows: pa.Table, field: PartitionField, table: TableMetadata) -> tuple[pa.Array, list[Any]]:
    """For each row the position of its partition value in a list of them, and that list."""
    source = table.schema().find_field(field.source_id)
    if source.name not in rows.column_names:
        raise InvalidInput("partition_by", f"{source.name!r} is not a column of this batch, and no top level one")
    encoded = rows.column(source.name).combine_chunks().dictionary_encode(null_encoding="encode")
    transform = field.transform.transform(source.field_type)
    positions: dict[Any, int] = {}
    for value in _physical(encoded.dictionary):
        positions.setdefault(transform(value), len(positions))
    by_value = [positions[transform(value)] for value in _physical(encoded.dictionary)]
    return pc.take(pa.array(by_value, pa.int64()), encoded.indices), list(positions)


def _physical(values: pa.Array) -> list[Any]:
    """Values as Iceberg's transforms want them: times and dates as the numbers they are stored as."""
    kind = values.type
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_date(kind):
        values = values.cast(pa.int32())
    found: list[Any] = values.to_pylist()
    return found
