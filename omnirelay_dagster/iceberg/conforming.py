"""From a published parquet file to data files of the table: as it is where Iceberg allows, rewritten where not."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from omnirelay_dagster.iceberg.arrow_types import INSTANT, as_it_is, wanted_schema
from omnirelay_dagster.iceberg.errors import FilesWrong, SchemaDrift
from omnirelay_dagster.iceberg.log_reading import ParquetFile
from omnirelay_dagster.iceberg.splitting import split

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata

_BYTES_AT_ONCE = 128 * 2**20
_ROWS_AT_ONCE = 64_000


class Footer(NamedTuple):
    """What a file says about itself. ``wanted`` are its columns as Iceberg would have them."""

    file: ParquetFile
    metadata: Any  # pyarrow.parquet.FileMetaData
    found: pa.Schema
    wanted: pa.Schema
    int96: frozenset[str]

    @property
    def rows(self) -> int:
        return int(self.metadata.num_rows)

    @property
    def where(self) -> str:
        published = self.file.batch.published
        return f"{self.file.uri} (batch number {published.sequence_number} of {published.subject})"

    @property
    def untyped(self) -> frozenset[str]:
        return frozenset(field.name for field in self.wanted if pa.types.is_null(field.type))

    def schema(self) -> Schema:
        """The columns as an Iceberg schema without ids; those with nothing but nulls have no type and are left out."""
        from pyiceberg.io.pyarrow import UnsupportedPyArrowTypeException, _pyarrow_to_schema_without_ids

        try:
            return _pyarrow_to_schema_without_ids(self.typed(), format_version=2)
        except (UnsupportedPyArrowTypeException, ValueError) as error:
            raise SchemaDrift(f"{self.where}: {error}; convert the column to a type that Iceberg has") from error

    def typed(self) -> pa.Schema:
        return pa.schema([field.remove_metadata() for field in self.wanted if field.name not in self.untyped])


def read_footer(fs: Any, file: ParquetFile) -> Footer:
    try:
        with fs.open(file.path, "rb") as stream:
            metadata = pq.read_metadata(stream)
    except (pa.ArrowException, OSError) as error:
        raise FilesWrong(
            f"{file.uri} (batch number {file.batch.published.sequence_number}) cannot be read as parquet: {error}"
        ) from error
    found = metadata.schema.to_arrow_schema()
    columns = (metadata.schema.column(n) for n in range(len(metadata.schema)))
    int96 = frozenset(column.path.split(".")[0] for column in columns if column.physical_type == "INT96")
    wanted = wanted_schema(found, int96, file.uri)
    for name in file.values:
        if name not in wanted.names:
            wanted = wanted.append(pa.field(name, pa.string()))
    return Footer(file, metadata, found, wanted, int96)


def typed_like(footer: Footer, table: Schema) -> Footer:
    """Columns that only folder names tell have no type of their own: they take the table's, if it has them."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    if not footer.file.values:
        return footer
    known = {field.name: field for field in schema_to_pyarrow(table, include_field_ids=False)}
    fields = [known.get(field.name, field) if field.name in footer.file.values else field for field in footer.wanted]
    return footer._replace(wanted=pa.schema([field.remove_metadata() for field in fields]))


def data_files(footer: Footer, fs: Any, table: TableMetadata, io: FileIO) -> tuple[list[DataFile], bool]:
    """The table's data files for a published one, and whether they had to be written anew."""
    if as_it_is(footer.found) and not footer.int96 and not footer.file.values:
        same = _same_file(footer, table)
        if same is not None:
            return [same], False
    return list(_rewritten(footer, fs, table, io)), True


def _same_file(footer: Footer, table: TableMetadata) -> DataFile | None:
    """The published file itself as a data file.

    None if it has rows of more than one of the table's partitions, or stores a type in a way that Iceberg does not.
    """
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

    schema = table.schema()
    try:
        statistics = data_file_statistics_from_parquet_metadata(
            parquet_metadata=footer.metadata,
            stats_columns=compute_statistics_plan(schema, table.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(schema),
        )
        partition = statistics.partition(table.spec(), schema)
    except (KeyError, ValueError):
        return None
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=footer.file.uri,
        file_format=FileFormat.PARQUET,
        partition=partition,
        file_size_in_bytes=footer.file.size,
        sort_order_id=None,
        spec_id=table.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def _rewritten(footer: Footer, fs: Any, table: TableMetadata, io: FileIO) -> Iterator[DataFile]:
    """The rows in files of the table's own, each of one partition, a bounded number of rows at a time."""
    from pyiceberg.io.pyarrow import pyarrow_to_schema, schema_to_pyarrow, write_file
    from pyiceberg.table import WriteTask

    target = {field.name: field for field in schema_to_pyarrow(table.schema(), include_field_ids=False)}
    names, format_version = table.schema().name_mapping, table.format_version
    numbers = itertools.count()
    with fs.open(footer.file.path, "rb") as stream:
        for some in _portions(pq.ParquetFile(stream)):
            rows = _converted(some, footer, target)
            schema = pyarrow_to_schema(rows.schema, name_mapping=names, format_version=format_version)
            tasks = (
                WriteTask(uuid.uuid4(), next(numbers), schema, part.to_batches(), partition_key=key)
                for key, part in split(rows, table)
            )
            yield from write_file(io, table, tasks)


def _portions(file: pq.ParquetFile) -> Iterator[pa.Table]:
    held: list[pa.RecordBatch] = []
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE):
        held.append(batch)
        if sum(each.nbytes for each in held) >= _BYTES_AT_ONCE:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _converted(some: pa.Table, footer: Footer, target: dict[str, pa.Field]) -> pa.Table:
    columns: dict[str, pa.ChunkedArray | pa.Array] = {}
    for field in footer.wanted:
        kind = target[field.name].type
        if field.name in some.column_names:
            columns[field.name] = _cast(some.column(field.name), kind, field.name, footer)
        else:
            value = pa.array([footer.file.values[field.name]], pa.string())
            columns[field.name] = pa.repeat(_cast(value, kind, field.name, footer)[0], len(some))
    return pa.table(columns)


def _cast(values: Any, kind: pa.DataType, name: str, footer: Footer) -> Any:
    try:
        if name in footer.int96 and kind == INSTANT:
            values = values.cast(pa.timestamp("us")).cast(INSTANT)
        return values.cast(kind)
    except pa.ArrowException as error:
        raise SchemaDrift(
            f"{footer.where}: column {name!r} cannot be stored as {kind} without loss ({error}). Nothing is rounded "
            "or cut off here: have the producer do so if that is meant",
            (name,),
        ) from error
