"""Spark DataFrames as outputs of leases: executors write parquet, and readers get exactly what was published."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

from omnirelay_dagster.spark.output_files import OutputFiles, read_notes, write_note
from omnirelay_dagster.spark.schema_drift import Columns
from omnirelay_dagster.spark.session import session_of
from omnirelay_dagster.type_handlers import Storing, TypeHandler, is_kind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_TIMESTAMPS = "spark.sql.parquet.outputTimestampType"
_PATTERN = re.compile(r"[\\{}\[\]*?]")
_LAYOUT = 3  # folders between an asset's and a partitioned output: partition, lease, part
_IN_HADOOP = {"file": "file", "local": "file", "s3": "s3a", "s3a": "s3a", "gs": "gs", "gcs": "gs", "hdfs": "hdfs"}
_IN_HADOOP |= {"abfs": "abfs", "abfss": "abfss", "az": "abfs", "adl": "adl", "webhdfs": "webhdfs", "viewfs": "viewfs"}


class SparkHandler(TypeHandler):
    """DataFrames as parquet, written by the executors and read by them, of classic sessions and of Spark Connect.

    An output is a folder of files. Reading gives one lazy DataFrame over the files of all batches, with one schema that
    is known from the start, so that a column selection or a filter decides what is read at all.
    """

    name = "spark"
    suffix = ".parquet"

    def __init__(self, storing: Storing | None = None) -> None:
        self._storing = storing or Storing()

    def matches(self, kind: type) -> bool:
        return is_kind(kind, "pyspark.sql", "DataFrame")

    def configured(self, storing: Storing) -> SparkHandler:
        return SparkHandler(storing)

    def write(self, value: DataFrame, fs: Any, path: str) -> int:
        """Check the columns, let Spark write, and note what it has written."""
        schema, partition_by = value.schema, self._storing.partition_by
        _check_partitions(schema, partition_by)
        columns = Columns(self._storing.subject, self._storing.schema_evolution)
        for output in read_notes(fs, self._storing.earlier()):
            columns.add(output.schema, output.name, published=True)
        columns.add(schema, "this batch", published=False)
        with _microseconds(value.sparkSession):
            # the folder belongs to this lease alone: what is there is from a failed try of its own
            writer = value.write.mode("overwrite")
            (writer.partitionBy(*partition_by) if partition_by else writer).parquet(hadoop_path(fs, path))
        return write_note(fs, path, schema, partition_by)

    def read(self, fs: Any, paths: Sequence[str]) -> DataFrame:
        """A DataFrame over the outputs. Nothing of them is read before it is used."""
        from pyspark.sql import DataFrame
        from pyspark.sql.types import StructType

        spark = session_of(self._storing.session)
        outputs = read_notes(fs, paths)
        columns = Columns(self._storing.subject, self._storing.schema_evolution)
        for output in outputs:
            columns.add(output.schema, output.name, published=True)
        schema = columns.schema()
        if not any(output.files for output in outputs):
            return spark.createDataFrame([], schema if outputs else StructType())
        # one scan for all batches, or one for each way of partitioning them that was ever used
        ways = dict.fromkeys(output.partition_by for output in outputs if output.files)
        scans = [_scan(spark, fs, [each for each in outputs if each.partition_by == way], schema) for way in ways]
        return reduce(DataFrame.unionByName, scans)


def _scan(spark: SparkSession, fs: Any, outputs: Sequence[OutputFiles], schema: StructType) -> DataFrame:
    """One scan over the files of outputs that are partitioned alike."""
    files = [f"{output.path}/{file}".rstrip("/") for output in outputs for file in output.files]
    reader = spark.read.schema(schema)
    if outputs[0].partition_by:
        above = outputs[0].path.split("/")[:-_LAYOUT]
        reader = reader.option("basePath", hadoop_path(fs, "/".join(above)))
    # the names are names, not patterns, whatever signs they have
    frame = reader.parquet(*(_PATTERN.sub(r"\\\g<0>", hadoop_path(fs, file)) for file in files))
    return frame.select(*("`" + name.replace("`", "``") + "`" for name in schema.names))


def hadoop_path(fs: Any, path: str) -> str:
    """An fsspec path as Spark's file systems have it."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    if protocol not in _IN_HADOOP:
        known = ", ".join(sorted(set(_IN_HADOOP)))
        raise ValueError(f"base_path: Spark cannot reach {protocol}://; use a local folder or one of {known}")
    scheme = _IN_HADOOP[protocol]
    return f"file://{path}" if scheme == "file" else f"{scheme}://{path.removeprefix(f'{protocol}://')}"


def _check_partitions(schema: StructType, partition_by: Sequence[str]) -> None:
    from pyspark.sql import types as t

    fitting = (t.StringType, t.DateType, t.BooleanType, t.ByteType, t.ShortType, t.IntegerType, t.LongType)
    kinds = {field.name: field.dataType for field in schema.fields}
    for name in partition_by:
        if name not in kinds:
            raise ValueError(f"omnirelay/partition_by: there is no column {name!r}, only {', '.join(kinds)}")
        if not isinstance(kinds[name], fitting):
            raise TypeError(
                f"omnirelay/partition_by: {name} is {kinds[name].simpleString()}; partition by text, whole numbers, "
                "dates or booleans, and cast to one of these if need be"
            )
    if partition_by and len(partition_by) == len(kinds):
        raise ValueError("omnirelay/partition_by: names every column; leave at least one to be stored in the files")
    for name in kinds if partition_by else ():
        if name.lower().startswith("omnirelay_"):
            raise ValueError(f"the column {name} has a name that partitioned outputs need for themselves; rename it")


_writing: dict[int, tuple[int, str | None]] = {}
_lock = threading.Lock()


@contextmanager
def _microseconds(spark: SparkSession) -> Iterator[None]:
    """Timestamps as microseconds, which every reader of parquet knows, rather than INT96, which many refuse.

    The setting is the session's, and other threads may be writing too: the last one puts it back.
    """
    key = id(spark)
    with _lock:
        writers, before = _writing.get(key) or (0, spark.conf.get(_TIMESTAMPS))
        _writing[key] = (writers + 1, before)
        spark.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        with _lock:
            writers, before = _writing.pop(key)
            if writers > 1:
                _writing[key] = (writers - 1, before)
            elif before is not None:
                spark.conf.set(_TIMESTAMPS, before)
