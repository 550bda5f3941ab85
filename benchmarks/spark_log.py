"""The log as a Spark source, against what one could do instead: `python -m benchmarks --only spark-log`.

A queue is filled until its log has 1,000,000 events (enqueue, lease, complete in batches of 100) and read, in turns:

- **ours**: the source, all 25 columns, into Spark's noop sink, in one partition and in as many as there are cores;
- **raw ADBC**: the same rows without any queue or Spark: a plain SQLite table with one row an event and the same 25
  columns, holding the very values that the source gives, fetched as Arrow batches by one process;
- **row tuples**: a Spark source on the same log that yields a tuple for each event, as most Python sources do, made
  straight from the documents, in as many partitions as there are cores.

The plain table stands for "a raw fetch of the same rows" because the log itself is kept more tightly: its rows are
documents of many events. What fetching just the documents takes is shown as well; it is not the same rows.
Spark's own start is not counted; planning, workers and hand-over are. Each is warmed up once, on a tenth of the log.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks import report
from benchmarks.targets import Target
from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.log import Document
from lease_core.model import to_datetime

Times = dict[str, list[float]]
NAMESPACE = "bench"
BATCH = 100


def fill(url: str, events: int, tell: Callable[[int], None]) -> int:
    """Work items through the queue until its log has at least this many events. Gives how many it has."""
    with LeaseQueue.open(url, NAMESPACE, QueueConfig(durability="relaxed")) as queue:
        for number in range(0, -(-events // 3), BATCH):
            items = [
                WorkItem("file", f"s3://landing/2026/{number + n:09d}.json", body=b"x" * 100) for n in range(BATCH)
            ]
            queue.enqueue(items, peer_id="producer", principal="ingest")
            leases = queue.lease("worker-1", BATCH, principal="etl")
            queue.complete([lease.token for lease in leases], result={"rows": number}, principal="etl")
            tell(3 * BATCH)
        return queue.stats().head


def copy_as_table(url: str, path: Path, events: int) -> None:
    """The same events as rows of a plain table, column by column what the source gives."""
    import adbc_driver_sqlite.dbapi
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    from omnirelay_dagster.spark.log_columns import to_batches
    from omnirelay_dagster.spark.log_reading import open_log
    from omnirelay_dagster.spark.log_schema import table_schema

    schema = to_arrow_schema(table_schema(), timezone="UTC")

    def plain(column: pa.Array) -> pa.Array:
        if pa.types.is_timestamp(column.type):
            return column.cast(pa.int64())
        if pa.types.is_nested(column.type):
            return pa.array([msgspec.json.encode(value).decode() for value in column.to_pylist()])
        return column.cast(pa.int64()) if pa.types.is_boolean(column.type) else column

    with (
        open_log(url, NAMESPACE) as log,
        adbc_driver_sqlite.dbapi.connect(str(path)) as connection,
        connection.cursor() as cursor,
    ):
        documents = log.documents(log.head().ns, 1, events)
        for at, batch in enumerate(to_batches(documents, NAMESPACE, 1, events, schema)):
            rows = pa.RecordBatch.from_arrays([plain(column) for column in batch.columns], schema.names)
            cursor.adbc_ingest("event", rows, mode="append" if at else "create")
        connection.commit()


def fetch_table(path: Path, upto: int) -> int:
    """Every row of the plain table through ADBC, batch by batch, and nothing else."""
    import adbc_driver_sqlite.dbapi

    with adbc_driver_sqlite.dbapi.connect(str(path)) as connection, connection.cursor() as cursor:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": "32768"})
        cursor.execute("SELECT * FROM event WHERE sequence_number <= ?", [upto])
        return sum(batch.num_rows for batch in cursor.fetch_record_batch())


def fetch_documents(url: str, upto: int) -> int:
    from omnirelay_dagster.spark.log_reading import open_log

    with open_log(url, NAMESPACE) as log:
        return sum(last - first + 1 for first, last, _ in log.documents(log.head().ns, 1, upto))


def tuples(first: int, document: Any, lowest: int, highest: int) -> Iterator[tuple[Any, ...]]:
    """A document's events as tuples in the source's columns: the plain way, an event at a time."""
    parsed = msgspec.json.decode(document, type=Document)
    at = time_of(parsed.at)
    number = first
    for entry in parsed.entries:
        items = [msgspec.json.decode(item) for item in entry.items or ()]
        shared = (entry.resource_type, entry.resource_id, entry.partition_key)
        result = None if entry.result is msgspec.UNSET else bytes(entry.result).decode()
        held = entry.lease is not None
        for index in range(max(0, lowest - number), min(entry.n, highest - number + 1)):
            if items:
                item = items[index]
                name = (item["resourceType"], item["resourceId"], item.get("partitionKey"))
            else:
                name = tuple(value[index] if isinstance(value, list) else value for value in shared)
            fence = number + index if entry.type == "LeaseGranted" else (entry.fence or 0) + index
            yield (
                NAMESPACE, number + index, entry.type, at, entry.id + index if entry.id else None,
                entry.attempt if held else None, entry.lease, fence if held else None, *name,
                entry.peer, entry.principal, entry.error, [], result,
                entry.pending + entry.pending_step * (index + 1), entry.active + entry.active_step * (index + 1),
                time_of(entry.expires_at), time_of(entry.available_at), time_of(entry.enqueued_at),
                entry.requeued, entry.attempt, entry.metadata, parsed.v,
            )  # fmt: skip
        number += entry.n


def time_of(micros: int | None) -> Any:
    return None if micros is None else to_datetime(micros)


def register_tuples(spark: Any) -> None:
    """The same source, but for what its ``read`` yields."""
    from omnirelay_dagster.spark.log_reading import open_log
    from omnirelay_dagster.spark.log_source import LogReader, LogSource

    class TupleReader(LogReader):
        def read(self, partition: Any) -> Iterator[Any]:
            with open_log(self.options.url, self.options.namespace, self.options.fetch) as log:
                for first, _, body in log.documents(partition.ns, partition.lowest, partition.highest):
                    yield from tuples(first, body, partition.lowest, partition.highest)

    class TupleSource(LogSource):
        @classmethod
        def name(cls) -> str:
            return "omnirelay_log_tuples"

        def reader(self, schema: Any) -> Any:
            return TupleReader(self._given, schema)

    spark.dataSource.register(TupleSource)


def run(directory: Path, quick: bool, console: Console, results: Path) -> list[Target]:
    """Fill, read in turns, show, and leave the numbers in ``results``."""
    events, rounds = (100_000, 2) if quick else (1_000_000, 3)
    cores = min(os.cpu_count() or 1, 8)
    url, table = f"sqlite:///{directory.absolute() / 'log.db'}", directory / "table.db"
    spark = _session(cores)
    try:
        times = _measure(spark, url, table, events, rounds, cores, console)
    finally:
        spark.stop()
    targets = _targets(times, cores)
    console.print(report.targets_table("Spark log source", targets))
    rates = {name: round(events / statistics.median(taken)) for name, taken in times.items()}
    found = {"events": events, "events_per_second": rates, "targets": [asdict(target) for target in targets]}
    (results / f"spark-log{'-quick' if quick else ''}.json").write_text(json.dumps(found, indent=1) + "\n")
    return targets


def _session(cores: int) -> Any:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    root = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    from pyspark.sql import SparkSession

    from omnirelay_dagster.spark.log_source import register

    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.driver.memory": "2g"}
    builder = SparkSession.builder.master(f"local[{cores}]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    register_tuples(session)
    return session


def _measure(spark: Any, url: str, table: Path, events: int, rounds: int, cores: int, console: Console) -> Times:
    console.print(f"filling a log with {events:,} events")
    fill(url, events, lambda _: None)
    copy_as_table(url, table, events)
    if not check_same_rows(url, table, events):
        raise RuntimeError("the plain table does not hold the events of the log")

    def through_spark(source: str, partitions: int) -> Callable[[int], None]:
        def read(upto: int) -> None:
            frame = spark.read.format(source).options(
                url=url, namespace=NAMESPACE, to_sequence=upto, partition_size=-(-upto // partitions)
            )
            frame.load().write.format("noop").mode("overwrite").save()

        return read

    contenders: dict[str, Callable[[int], Any]] = {
        "ours, 1 partition": through_spark("omnirelay_log", 1),
        f"ours, {cores} partitions": through_spark("omnirelay_log", cores),
        "raw ADBC, the same rows": lambda upto: fetch_table(table, upto),
        f"row tuples, {cores} partitions": through_spark("omnirelay_log_tuples", cores),
        "documents only": lambda upto: fetch_documents(url, upto),
    }
    times: Times = {name: [] for name in contenders}
    for read in contenders.values():
        read(events // 10)
    for number in range(1, rounds + 1):
        for name, read in contenders.items():
            started = time.perf_counter()
            read(events)
            times[name].append(time.perf_counter() - started)
        told = "; ".join(f"{name} {events / taken[-1]:,.0f}/s" for name, taken in times.items())
        console.print(f"round {number}/{rounds}: {told}", highlight=False, markup=False)
    return times


def _targets(times: Times, cores: int) -> list[Target]:
    one, many, raw, rows, _ = times.values()

    def ratio(slow: list[float], fast: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(slow, fast, strict=True))

    found = [
        ("Spark log source: against a raw ADBC fetch of the same rows", 0.5, ratio(raw, many)),
        ("Spark log source: against a row-tuple source", 1.4, ratio(rows, many)),
    ]
    if cores > 1:
        found.append((f"Spark log source: {cores} partitions against 1", 1.2, ratio(one, many)))
    return [
        Target(work, f"at least {needed:g}x", reached, "PASS" if reached >= needed else "MISS")
        for work, needed, reached in found
    ]


def check_same_rows(url: str, table: Path, events: int) -> bool:
    """Whether the plain table has as many rows as the log has events, the last one's number among them."""
    with sqlite3.connect(table) as connection:
        count, last = connection.execute("SELECT count(*), max(sequence_number) FROM event").fetchone()
    return (count, last) == (events, events) and fetch_documents(url, events) >= events
