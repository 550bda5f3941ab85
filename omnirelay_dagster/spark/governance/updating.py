"""Bringing the tables up to date: read what is new in the log, fold it in, publish all tables with the watermark.

An update that crashes anywhere before its manifest is committed leaves the tables as they were; the next one reads the
same events again. There is nothing in between, so nothing is lost and nothing counted twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lease_core.errors import EventsPruned, InvalidInput
from omnirelay_dagster.spark.governance import folding
from omnirelay_dagster.spark.governance.folding import Thresholds
from omnirelay_dagster.spark.governance.stored import Manifest, Parts, Storage, UpdateConflict, load
from omnirelay_dagster.spark.log_archive import open_archived
from omnirelay_dagster.spark.log_reading import LogHead, absolute
from omnirelay_dagster.spark.log_source import FORMAT, register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIMESTAMPS = "spark.sql.parquet.outputTimestampType"
_MOST_TIMING_FILES = 16  # of one day; then they are written anew as one
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Update(NamedTuple):
    """What an update did: the events it read, in how many steps, and the version it led to."""

    events: int
    steps: int
    manifest: Manifest


class Touched(NamedTuple):
    """What a range of events has to do with: how many, parts of the item table, days, the latest time."""

    events: int
    item_parts: list[str]
    days: list[str]
    latest: datetime


class TablesBehind(EventsPruned):
    """The log was pruned beyond what the tables have read."""

    def __init__(self, after: int, oldest: int) -> None:
        super().__init__(after, oldest)
        self.args = (
            f"the tables have read up to event {after}, but the log was pruned and begins at {oldest}: start new ones "
            "in another folder, and register a reader (reader=...) so that pruning waits for them, or name the log's "
            "archive (archive=...)",
        )


def bring_up_to_date(
    spark: SparkSession,
    *,
    url: str,
    namespace: str,
    storage: str | os.PathLike[str],
    archive: str | None = None,
    max_events: int = 2_000_000,
    thresholds: Thresholds | None = None,
    log: Callable[[str], None] = lambda _: None,
    probe: Callable[[str], None] = lambda _: None,
) -> Update:
    """Read everything that is new in the queue's log, up to ``max_events`` in a step, and publish it in the tables.

    Running it again when there is nothing new changes nothing. Two at once are safe: one of them starts over. What was
    pruned from the log is read from ``archive``, the address of an ``ObjectStoreSink``, if there is one. ``probe`` is
    told of the points between which a crash could fall.
    """
    if max_events < 1:
        raise InvalidInput("max_events", "must be at least 1")
    register(spark)
    home, url = Storage(storage), absolute(url)
    head = _head(url, namespace, archive)
    events = steps = 0
    while True:
        before = _continued(home.current(), head, namespace)
        if before.watermark >= head.number and before.version:
            home.vacuum()
            return Update(events, steps, before)
        upto = min(head.number, before.watermark + max_events)
        log(f"reading events {before.watermark + 1} to {upto} of {head.number}")
        step = _Step(spark, home, before, thresholds or Thresholds(), probe)
        try:
            after = step.run(url, archive, upto)
        except UpdateConflict as conflict:
            log(f"{conflict}; starting over from there")
            head = _head(url, namespace, archive)
            continue
        events += upto - before.watermark
        steps += 1
        log(f"published version {after.version}, up to event {after.watermark}")


def _head(url: str, namespace: str, archive: str | None) -> LogHead:
    with open_archived(url, namespace, archive) as source:
        return source.head()


def _continued(current: Manifest | None, head: LogHead, namespace: str) -> Manifest:
    """Where to go on: the current version, or a beginning at what is left of the log."""
    if current is None:
        return Manifest(namespace, head.queue_id, first=head.pruned + 1, watermark=head.pruned)
    if (current.namespace, current.queue_id) != (namespace, head.queue_id) or current.watermark > head.number:
        raise InvalidInput(
            "storage",
            f"holds the tables of another queue ({current.namespace!r}, up to event {current.watermark}); "
            "use a folder for each queue",
        )
    if current.watermark < head.pruned:
        raise TablesBehind(current.watermark, head.pruned + 1)
    return current


class _Step:
    """One version to the next."""

    def __init__(
        self, spark: SparkSession, home: Storage, before: Manifest, limits: Thresholds, probe: Callable[[str], None]
    ) -> None:
        self._spark, self._home, self._before, self._limits, self._probe = spark, home, before, limits, probe

    def run(self, url: str, archive: str | None, upto: int) -> Manifest:
        before = self._before
        events = (
            self._spark.read.format(FORMAT)
            .options(**({} if archive is None else {"archive": archive}))
            .option("url", url)
            .option("namespace", before.namespace)
            .option("from_sequence", before.watermark + 1)
            .option("to_sequence", upto)
            .option("columns", folding.EVENT_COLUMNS)
            .load()
            .persist()
        )
        try:
            touched = _touched(events)
            if touched.events != upto - before.watermark:
                raise RuntimeError(f"{touched.events} events came where {upto - before.watermark} are in the log")
            self._probe("read")
            as_of = max(touched.latest, before.as_of or touched.latest)
            tables = self._tables(events, touched, as_of) if touched.events else before.tables
        finally:
            events.unpersist()
        after = msgspec.structs.replace(before, version=before.version + 1, watermark=upto, as_of=as_of, tables=tables)
        self._probe("before-commit")
        self._home.commit(after)
        self._probe("after-commit")
        return after

    def _tables(self, events: DataFrame, touched: Touched, as_of: datetime) -> dict[str, Parts]:
        folder = self._home.attempt(self._before.version + 1)
        self._probe("begun")
        with _plain_timestamps(self._spark):
            lines = folding.lifelines(events, self._stored("item_history", touched.item_parts)).persist()
            try:
                items = folding.item_history(lines).withColumn("part", folding.item_part(F.col("sequence_id")))
                item_parts = self._write(items, folder, "item_history")
                timings = self._timings(lines, folder, touched.days)
            finally:
                lines.unpersist()
            self._probe("half-written")
            latency = self._latency(timings, folder, touched.days)
            activity = self._activity(events, folder, touched.days)
            found = folding.anomalies(self._recent(activity, as_of), as_of, self._limits)
            written = self._write(found.coalesce(1).withColumn("part", F.lit("all")), folder, "anomalies")
        return {
            "item_history": self._before.tables.get("item_history", {}) | item_parts,
            "lease_timings": timings,
            "lease_latency": latency,
            "peer_activity": activity,
            "anomalies": written,
        }

    def _timings(self, lines: DataFrame, folder: Path, days: list[str]) -> Parts:
        """Timings are added to; a day that has come to many files is written anew."""
        held = self._before.tables.get("lease_timings", {})
        scattered = [day for day in days if len(held.get(day, ())) >= _MOST_TIMING_FILES]
        fresh = folding.lease_timings(lines).unionByName(self._stored("lease_timings", scattered))
        parts = self._write(fresh.withColumn("part", folding.day_of(F.col("hour"))), folder, "lease_timings")
        added = {day: ([] if day in scattered else held.get(day, [])) + files for day, files in parts.items()}
        return held | added

    def _latency(self, timings: Parts, folder: Path, days: list[str]) -> Parts:
        files = [str(self._home.folder / path) for day in days for path in timings.get(day, ())]
        latency = folding.lease_latency(load(self._spark, "lease_timings", files))
        parts = self._write(latency.withColumn("part", folding.day_of(F.col("hour"))), folder, "lease_latency")
        return self._before.tables.get("lease_latency", {}) | parts

    def _activity(self, events: DataFrame, folder: Path, days: list[str]) -> Parts:
        activity = folding.peer_activity(events, self._stored("peer_activity", days))
        parts = self._write(activity.withColumn("part", folding.day_of(F.col("hour"))), folder, "peer_activity")
        return self._before.tables.get("peer_activity", {}) | parts

    def _recent(self, activity: Parts, as_of: datetime) -> DataFrame:
        oldest = (as_of - self._limits.window).date().isoformat()
        files = [str(self._home.folder / path) for day in sorted(activity) if day >= oldest for path in activity[day]]
        return load(self._spark, "peer_activity", files)

    def _stored(self, table: str, parts: list[str]) -> DataFrame:
        files = [str(self._home.folder / path) for path in self._before.files(table, parts)]
        return load(self._spark, table, files)

    def _write(self, rows: DataFrame, folder: Path, table: str) -> Parts:
        rows.repartition("part").write.partitionBy("part").parquet(str(folder / table))
        return self._home.collect(folder / table)


def _touched(events: DataFrame) -> Touched:
    found: Any = events.agg(
        F.count("*").alias("events"),
        F.collect_set(folding.item_part(F.col("sequence_id"))).alias("items"),
        F.collect_set(folding.day_of(F.col("timestamp"))).alias("days"),
        F.max(folding.micros(F.col("timestamp"))).alias("latest"),
    ).first()
    latest = _EPOCH + timedelta(microseconds=found["latest"] or 0)
    return Touched(found["events"], sorted(found["items"]), sorted(found["days"]), latest)


@contextmanager
def _plain_timestamps(spark: SparkSession) -> Iterator[None]:
    """Write timestamps in the form that every reader of parquet understands, whatever the session is set to."""
    before = spark.conf.get(_TIMESTAMPS, None)
    spark.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_TIMESTAMPS)
        else:
            spark.conf.set(_TIMESTAMPS, before)
