"""What one published parquet output consists of: its files, their columns, and how they are partitioned.

Spark writes a folder. What is in it when it is published is noted in the folder itself, in ``_published.json``: readers
go by that, so that nothing which appears there later is ever read. A single file, as pandas and Arrow write it, speaks
for itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

NOTE = "_published.json"
_AT_ONCE = 16


class OutputFiles(NamedTuple):
    """A published output: paths of its files relative to its own, its columns as Spark has them, and its partitions."""

    path: str
    files: tuple[str, ...]
    schema: StructType
    partition_by: tuple[str, ...]

    @property
    def name(self) -> str:
        """How errors call it: by the folder of its lease."""
        return "batch " + "/".join(self.path.split("/")[-2:])


_known: dict[tuple[str, str], OutputFiles] = {}
"""Outputs never change once they are published, so that each is looked at once a process."""


def write_note(fs: Any, path: str, schema: StructType, partition_by: Sequence[str]) -> int:
    """Note what Spark has just written to the folder. Gives its rows, which are counted in the files themselves."""
    import pyarrow.parquet as pq

    fs.invalidate_cache()
    if not fs.exists(path):
        raise FileNotFoundError(
            f"Spark says that it wrote {path}, but it cannot be seen from here: the executors need a file system that "
            "the driver shares. Set base_path to a folder or an address that all of them reach"
        )
    files = sorted(file for file in fs.find(path) if file.endswith(".parquet") and not _hidden(path, file))

    def rows_of(file: str) -> int:
        with fs.open(file, "rb") as stream:
            return int(pq.ParquetFile(stream).metadata.num_rows)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        rows = list(pool.map(rows_of, files))
    note = {
        "version": 1,
        "schema": schema.jsonValue(),
        "partition_by": list(partition_by),
        "files": [{"path": _below(path, file), "rows": count} for file, count in zip(files, rows, strict=True)],
    }
    with fs.open(f"{path}/{NOTE}", "wb") as stream:
        stream.write(json.dumps(note, ensure_ascii=False, separators=(",", ":")).encode())
    return sum(rows)


def read_notes(fs: Any, paths: Sequence[str]) -> list[OutputFiles]:
    """What the outputs at the paths consist of, in that order."""
    place = _place(fs)
    unknown = [path for path in paths if (place, path) not in _known]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for output in pool.map(lambda path: _look_at(fs, path), unknown):
            _known[(place, output.path)] = output
    return [_known[(place, path)] for path in paths]


def _place(fs: Any) -> str:
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return f"{protocol}:{fs.storage_options.get('endpoint_url', '')}"


def _look_at(fs: Any, path: str) -> OutputFiles:
    from pyspark.sql.types import StructType

    if not fs.isdir(path):
        return OutputFiles(path, ("",), _columns_of(fs, path), ())
    note = read_note(fs, path)
    schema = StructType.fromJson(note["schema"])
    return OutputFiles(path, tuple(file["path"] for file in note["files"]), schema, tuple(note["partition_by"]))


def read_note(fs: Any, path: str) -> dict[str, Any]:
    """The note in a folder that Spark wrote."""
    note: dict[str, Any] = json.loads(fs.cat_file(f"{path}/{NOTE}"))
    return note


def partition_columns(note: dict[str, Any]) -> pa.Schema:
    """The columns that such a folder is partitioned by, as Arrow has them. Works where there is no Spark."""
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "date": pa.date32(),
        "boolean": pa.bool_(),
        "byte": pa.int8(),
        "short": pa.int16(),
        "integer": pa.int32(),
        "long": pa.int64(),
    }
    types = {field["name"]: field["type"] for field in note["schema"]["fields"]}
    return pa.schema([(name, kinds[types[name]]) for name in note["partition_by"]])


def _below(path: str, file: str) -> str:
    return file.removeprefix(path).lstrip("/")


def _hidden(path: str, file: str) -> bool:
    """Whether it is one of Spark's own, such as what failed tasks leave behind."""
    return any(part.startswith(("_", ".")) for part in _below(path, file).split("/"))


def _columns_of(fs: Any, path: str) -> StructType:
    """The columns of a parquet file that somebody else than Spark wrote, as Spark would read them."""
    import pyarrow.parquet as pq
    from pyspark.sql.types import StructType

    with fs.open(path, "rb") as stream:
        arrow = pq.ParquetFile(stream).schema_arrow
    schema = StructType()
    for field in arrow:
        kind = _as_spark(field.type)
        if kind is None:
            remedy = "store microseconds (in pandas: astype('datetime64[us, UTC]'))" if _nanoseconds(field.type) else ""
            raise TypeError(
                f"the column {field.name} of {path} is {field.type}, which Spark does not read; "
                f"{remedy or 'cast it before it is stored, or load it with pandas or Arrow'}"
            )
        schema.add(field.name, kind)
    return schema


def _nanoseconds(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_timestamp(kind) and kind.unit == "ns")


def _as_spark(kind: Any) -> DataType | None:
    """What Spark makes of an Arrow type in a parquet file; none if it cannot read it."""
    import pyarrow as pa
    from pyspark.errors import PySparkException
    from pyspark.sql import types as t
    from pyspark.sql.pandas.types import from_arrow_type

    unsigned = {
        pa.uint8(): t.ShortType(),
        pa.uint16(): t.IntegerType(),
        pa.uint32(): t.LongType(),
        pa.uint64(): t.DecimalType(20, 0),
    }
    if kind in unsigned:
        return unsigned[kind]
    if pa.types.is_dictionary(kind):
        return _as_spark(kind.value_type)
    if pa.types.is_null(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind) or _nanoseconds(kind):
        return None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = _as_spark(kind.value_type)
        return None if inner is None else t.ArrayType(inner)
    if pa.types.is_struct(kind):
        parts = [(part.name, _as_spark(part.type)) for part in kind]
        if any(part is None for _, part in parts):
            return None
        return t.StructType([t.StructField(name, part) for name, part in parts if part is not None])
    try:
        # a timestamp without a zone is one without a zone, whatever the session's default for new tables
        return from_arrow_type(kind, prefer_timestamp_ntz=True)
    except PySparkException:
        return None
