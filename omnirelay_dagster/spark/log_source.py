"""The log as a Spark source: ``spark.read.format("omnirelay_log")`` and ``spark.readStream``.

A read is a range of sequence numbers, cut into partitions of equal size; each partition is read by an executor that
opens the database itself. A stream's offset is the number of the last event read.

Spark's planner and executors import this module, so the package must be installed where they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from lease_core.errors import InvalidInput
from lease_core.model import to_micros
from omnirelay_dagster.spark.log_archive import ArchivedLog, open_archived
from omnirelay_dagster.spark.log_columns import to_batches
from omnirelay_dagster.spark.log_options import LogOptions, read_options
from omnirelay_dagster.spark.log_reading import Log, LogHead, RangePruned
from omnirelay_dagster.spark.log_schema import check_schema, table_schema

FORMAT = "omnirelay_log"
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession, *, pushdown: bool | None = None) -> None:
    """Make ``omnirelay_log`` known to the session. Calling it again is harmless.

    ``pushdown=True`` also turns on Spark's filter pushdown for Python sources, so that filters on ``sequence_number``,
    ``type`` and ``timestamp`` reach the database and the decoder. Left out, it follows the session's setting. It is
    decided here because Spark refuses a source that takes filters while the setting is off.
    """
    if pushdown is not None:
        spark.conf.set(PUSHDOWN, str(pushdown).lower())
    pushing = str(spark.conf.get(PUSHDOWN, "false")).lower() == "true"
    spark.dataSource.register(FilteringLogSource if pushing else LogSource)


class LogSource(DataSource):
    """The source as Spark creates it. See docs/spark-log-source.md for its options and columns."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)  # type: ignore[arg-type]
        self._given = read_options(options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        return table_schema(self._given.include_items, self._given.columns)

    def reader(self, schema: StructType) -> LogReader:
        check_schema(schema)
        return LogReader(self._given, schema)

    def streamReader(self, schema: StructType) -> LogStreamReader:
        check_schema(schema)
        return LogStreamReader(self._given, schema)


class FilteringLogSource(LogSource):
    """The same, taking filters along."""

    def reader(self, schema: StructType) -> FilteringLogReader:
        check_schema(schema)
        return FilteringLogReader(self._given, schema)


class LogRange(InputPartition):
    """Events ``lowest`` to ``highest`` of the namespace that ``ns`` stands for in its database."""

    def __init__(self, ns: int, lowest: int, highest: int) -> None:
        super().__init__(None)
        self.ns, self.lowest, self.highest = ns, lowest, highest


class _RangeReading:
    """What batches and streams have in common: cutting a range into partitions, and reading one."""

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        self.options = options
        self.arrow_schema = to_arrow_schema(schema, timezone="UTC")
        self.types: frozenset[str] | None = None
        self.since: int | None = None
        self.until: int | None = None

    def opened(self) -> AbstractContextManager[Log | ArchivedLog]:
        options = self.options
        return open_archived(options.url, options.namespace, options.archive, options.fetch)

    def head(self) -> LogHead:
        with self.opened() as log:
            return log.head()

    def cut(self, ns: int, lowest: int, highest: int) -> list[LogRange]:
        size = self.options.partition_size
        return [LogRange(ns, at, min(at + size - 1, highest)) for at in range(lowest, highest + 1, size)]

    def batches(self, part: Any) -> Iterator[pa.RecordBatch]:
        if not isinstance(part, LogRange):  # Spark's stand-in for "no partitions"
            return
        with self.opened() as log:
            documents = log.documents(part.ns, part.lowest, part.highest, self.since, self.until)
            yield from to_batches(
                documents, self.options.namespace, part.lowest, part.highest, self.arrow_schema, self.types
            )


class LogReader(_RangeReading, DataSourceReader):
    """A range of the log, fixed when the query is planned."""

    def partitions(self) -> list[LogRange]:
        head = self.head()
        lowest, highest = self.bounds(head)
        return self.cut(head.ns, lowest, highest)

    def bounds(self, head: LogHead) -> tuple[int, int]:
        return self.options.first(head), self.options.last(head)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.batches(partition)


class FilteringLogReader(LogReader):
    """Narrows what is read by filters. Spark applies them once more, so narrowing too little is no mistake."""

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.lowest: int | None = None
        self.highest: int | None = None

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        for each in filters:
            match each:
                case EqualTo(("type",), str(value)):
                    self._only({value})
                case In(("type",), values):
                    self._only({value for value in values if isinstance(value, str)})
                case EqualTo() | In() | GreaterThan() | GreaterThanOrEqual() | LessThan() | LessThanOrEqual():
                    self._narrow(each)
            yield each

    def _only(self, types: set[str]) -> None:
        self.types = frozenset(types if self.types is None else self.types & types)

    def _narrow(self, each: Any) -> None:
        found = each.value if isinstance(each, In) else (each.value,)
        if each.attribute == ("timestamp",) and all(isinstance(value, datetime) for value in found):
            moments = [to_micros(value if value.tzinfo else value.replace(tzinfo=UTC)) for value in found]
            self.since, self.until = _narrowed(each, moments, self.since, self.until)
        elif each.attribute == ("sequence_number",) and all(isinstance(value, int) for value in found):
            self.lowest, self.highest = _narrowed(each, list(found), self.lowest, self.highest)

    def bounds(self, head: LogHead) -> tuple[int, int]:
        """As asked for by the options and, within that, by the filters: those may well ask for nothing."""
        options = self.options
        lowest = head.pruned + 1 if options.from_sequence is None else options.from_sequence
        if self.lowest is not None and self.lowest > lowest:
            options = options._replace(from_sequence=min(self.lowest, head.number + 1))
        highest = options.last(head)
        return options.first(head), highest if self.highest is None else min(highest, self.highest)


def _narrowed(each: Filter, values: list[int], low: int | None, high: int | None) -> tuple[int | None, int | None]:
    """The bounds that are left when the filter has to hold as well."""
    if not values:
        return low, high
    exclusive = isinstance(each, GreaterThan | LessThan)
    if not isinstance(each, LessThan | LessThanOrEqual):
        least = min(values) + exclusive
        low = least if low is None else max(low, least)
    if not isinstance(each, GreaterThan | GreaterThanOrEqual):
        most = max(values) - exclusive
        high = most if high is None else min(high, most)
    return low, high


class LogStreamReader(_RangeReading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as it grows. The offset ``{"sequence_number": n}`` says that everything up to ``n`` was read."""

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._until: int | None = None

    def initialOffset(self) -> dict[str, int]:
        return _offset(self.options.first(self.head()) - 1)

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self.options.max_events_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """What is there now is all that this run of the stream is to read."""
        self._until = self._end(self.head())

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        head, after = self.head(), start["sequence_number"]
        if after > head.number:
            raise InvalidInput(
                "url",
                f"the stream has read up to {after}, but the log ends at {head.number}: this is another queue, or an "
                "older copy of it; use the right one, or a new checkpoint",
            )
        if after < head.pruned:
            raise RangePruned(after, head.pruned + 1)
        end = self._end(head) if self._until is None else self._until
        if isinstance(limit, ReadMaxRows):
            end = min(end, after + limit.max_rows)
        return _offset(max(after, end))

    def _end(self, head: LogHead) -> int:
        asked = self.options.to_sequence
        return head.number if asked is None else min(asked, head.number)

    def reportLatestOffset(self) -> dict[str, int]:
        return _offset(self._end(self.head()))

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[LogRange]:
        return self.cut(self.head().ns, start["sequence_number"] + 1, end["sequence_number"])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.batches(partition)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to do: the log keeps no account of its readers here. Spark's checkpoint does."""


def _offset(number: int) -> dict[str, int]:
    return {"sequence_number": number}
