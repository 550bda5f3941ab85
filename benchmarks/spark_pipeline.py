"""What leasing costs a Spark pipeline: `python -m benchmarks --only spark`.

The demo fabric's bronze, which reads, checks and writes order files, runs as a Dagster asset over the same 1,000 files,
in turns, on one session that is warm:

- **leased**: a leased asset. It leases all files as one batch, renews the leases while it works, gets its items as a
  DataFrame, works in a job group of its own, and publishes through the fenced IO manager;
- **plain**: an asset that is told the files, runs the very same Spark code and writes parquet.

And how long it takes a further, ordinary batch in the same process to have its Spark job begin: from the lease on and,
for comparison, from when Dagster was asked for the run.
"""

# without `from __future__ import annotations`: Dagster reads the types of config
import json
import logging
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

from benchmarks.targets import Target
from definitions.bronze import MOST_BYTES, examine, records
from definitions.orders import write_files
from lease_core import WorkItem
from omnirelay_dagster import FencedIOManager, LeasedBatch, LeaseQueueResource, leased_asset
from omnirelay_dagster.doctor import prepare_environment

MOST_TIMES, SOONEST = 1.2, 2.0
ORDINARY = 25  # files: few enough for Spark to list them without a job

SPARK = {
    "spark.master": "local[*]",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


class Files(dg.Config):
    """What the plain asset is told."""

    folder: str
    output: str


@leased_asset(queue="landing", batch_size=10_000, io_manager_key="fenced")
def leased(batch: LeasedBatch, pyspark: LazyPySparkResource) -> DataFrame:
    return _bronze(batch.to_spark(pyspark), [item.resource_id for item in batch.items])


@dg.asset
def plain(config: Files, pyspark: LazyPySparkResource) -> None:
    paths = sorted(str(path) for path in Path(config.folder).glob("*.json"))
    items = pyspark.spark_session.createDataFrame(pa.table({"resource_id": paths}))
    _bronze(items, paths).write.parquet(config.output)


def _bronze(items: DataFrame, paths: Sequence[str]) -> DataFrame:
    aside = {path: problem for path, (_, problem) in examine(paths, MOST_BYTES).items()}
    return records(items, [path for path in paths if path not in aside], aside)


def run(scratch: Path, quick: bool, console: Console, results: Path) -> list[Target]:
    """Measure, show it, and leave the numbers in ``results``."""
    files, rounds = (100, 3) if quick else (1_000, 7)
    prepare_environment()
    logging.disable(logging.INFO)
    bench = Bench(scratch, files)
    try:
        times = bench.rounds(rounds, console)
        after_lease, after_call = zip(*(bench.begins_after() for _ in range(rounds)), strict=True)
    finally:
        bench.close()
        logging.disable(logging.NOTSET)
    targets = _targets(times, after_lease, files)
    times |= {"a job begins after its lease": list(after_lease), "after the call of the run": list(after_call)}
    found = {"files": files, "seconds": times, "targets": [target.row() for target in targets]}
    (results / f"spark-pipeline{'-quick' if quick else ''}.json").write_text(json.dumps(found, indent=1) + "\n")
    _show(times, targets, console)
    return targets


class Bench:
    """The files, a queue, and one Spark session."""

    def __init__(self, scratch: Path, files: int) -> None:
        self._scratch = scratch
        self._folder = scratch / "landing"
        self._files = [str(path) for path in write_files(self._folder, files)]
        self._landing = LeaseQueueResource(url=f"sqlite:///{scratch}/fabric.db", namespace="landing")
        self._pyspark = LazyPySparkResource(spark_config=SPARK)
        self._fenced = FencedIOManager(base_path=str(scratch / "published"), queue=self._landing)
        self._outputs = 0

    def rounds(self, rounds: int, console: Console) -> dict[str, list[float]]:
        """Seconds of both, in turns, and each round the other one first."""
        self._leased(self._files)
        self._plain()
        times: dict[str, list[float]] = {"leased": [], "plain": []}
        for number in range(1, rounds + 1):
            order = ("leased", "plain") if number % 2 else ("plain", "leased")
            for name in order:
                times[name].append(self._leased(self._files) if name == "leased" else self._plain())
            told = "; ".join(f"{name} {taken[-1]:.2f} s" for name, taken in times.items())
            console.print(f"round {number}/{rounds}: {told}", highlight=False)
        return times

    def begins_after(self) -> tuple[float, float]:
        """Seconds until the first Spark job of a further batch began: from its lease, and from the call of the run."""
        self._leased(self._files[:ORDINARY])
        queue = self._landing.get_queue()
        granted = next(event for event in queue.events(after=self._before) if event.type == "LeaseGranted")
        assert granted.token is not None
        context = SparkSession.active().sparkContext
        jobs = context.statusTracker().getJobIdsForGroup(f"omnirelay/landing/{granted.token.lease_id}")
        store = context._jsc.sc().statusStore()
        began = min(store.job(job).submissionTime().get().getTime() for job in jobs) / 1_000
        return began - granted.timestamp.timestamp(), began - self._called

    def _leased(self, files: Sequence[str]) -> float:
        """One run over one batch. Enqueueing is somebody else's work and not counted."""
        queue = self._landing.get_queue()
        queue.enqueue([WorkItem("file", path) for path in files])
        self._before = queue.stats().head
        resources = {"landing": self._landing, "fenced": self._fenced, "pyspark": self._pyspark}
        self._called = time.time()
        taken = _timed(leased, resources)
        assert queue.stats().pending == 0
        return taken

    def _plain(self) -> float:
        self._outputs += 1
        config = {"folder": str(self._folder), "output": str(self._scratch / "plain" / str(self._outputs))}
        return _timed(plain, {"pyspark": self._pyspark}, {"ops": {"plain": {"config": config}}})

    def close(self) -> None:
        self._landing.get_queue().close()
        if session := SparkSession.getActiveSession():
            session.stop()


def _timed(asset: dg.AssetsDefinition, resources: dict[str, Any], config: dict[str, Any] | None = None) -> float:
    with dg.DagsterInstance.ephemeral() as instance:
        started = time.perf_counter()
        done = dg.materialize([asset], resources=resources, run_config=config, instance=instance)
        taken = time.perf_counter() - started
    assert done.success
    return taken


def _targets(times: dict[str, list[float]], begins: Sequence[float], files: int) -> list[Target]:
    ratio = statistics.median(ours / plain for ours, plain in zip(times["leased"], times["plain"], strict=True))
    begun = statistics.median(begins)
    return [
        Target(
            f"Spark: {files:,} files as one leased batch against the same code without leasing",
            f"at most {MOST_TIMES:g}x",
            ratio,
            "PASS" if ratio <= MOST_TIMES else "MISS",
        ),
        Target(
            "Spark: seconds from the lease of a second batch in the same process until its job begins",
            f"under {SOONEST:g}",
            begun,
            "PASS" if begun < SOONEST else "MISS",
        ),
    ]


def _show(times: dict[str, list[float]], targets: Sequence[Target], console: Console) -> None:
    table = Table("what", "median s", "best s", title="A Spark pipeline, leased and plain")
    for name, taken in times.items():
        table.add_row(name, f"{statistics.median(taken):.2f}", f"{min(taken):.2f}")
    console.print(table)
    for target in targets:
        console.print(f"{target.verdict}: {target.work}: {target.reached:.2f} ({target.needed})", highlight=False)
