"""Committing a published batch to an Iceberg table: as fast into an old table as into a young one.

One table gets hundreds of commits, a batch each. Then commits are timed in turns: one into a table that has had a
single commit before, made anew for every turn, and one into the old table. So whatever else the machine does falls on
both.
"""

from __future__ import annotations

import json
import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import dagster as dg
import pyarrow as pa
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import stores
from benchmarks.targets import Target
from lease_core import WorkItem
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.iceberg import IcebergTable, open_catalog
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from tests.servers.postgres import PostgresEndpoint, PostgresServer

ROWS = 1_000
NEEDED = 1.5


@dataclass(frozen=True)
class Measured:
    store: str
    commits: int
    young_ms: float
    old_ms: float
    snapshots: int
    metadata_kib: float


def run(scratch: Path, quick: bool, console: Console, results: Path) -> list[Target]:
    """Measure on both catalogs, show it, and leave the numbers in ``results``."""
    commits, turns = (60, 8) if quick else (500, 25)
    measured = [_measure("sqlite", f"sqlite:///{scratch}/catalog.db", scratch / "sqlite", commits, turns, console)]
    with _postgres_database(scratch / "postgres") as url:
        measured.append(_measure("postgres", url, scratch / "pg", commits, turns, console))
    targets = [_target(each) for each in measured]
    path = results / f"iceberg{'-quick' if quick else ''}.json"
    path.write_text(json.dumps([asdict(each) for each in measured], indent=1) + "\n")
    _show(measured, targets, console)
    return targets


@contextmanager
def _postgres_database(directory: Path) -> Iterator[str]:
    """An empty database on a server of our own, or on the one that the environment names."""
    with ExitStack() as stack:
        given = os.environ.get(stores.POSTGRES_URL)
        server = PostgresEndpoint(given) if given else stack.enter_context(PostgresServer(directory))
        name = f"bench_{uuid.uuid4().hex[:12]}"
        yield server.create_database(name)
        server.drop_database(name)


def _measure(store: str, url: str, home: Path, commits: int, turns: int, console: Console) -> Measured:
    home.mkdir()
    catalog = open_catalog(url, home / "lake")
    old = _Feed(home / "old", IcebergTable("lake.old", catalog))
    for _ in track(range(commits), f"{commits} commits on {store}", console=console, disable=not console.is_terminal):
        old.timed()
    young_ms, old_ms = [], []
    for turn in range(turns):
        young = _Feed(home / f"young-{turn}", IcebergTable(f"lake.young_{turn}", catalog))
        young.timed()
        young_ms.append(1_000 * young.timed())
        old_ms.append(1_000 * old.timed())
        young.close()
    there = old.table.load()
    assert there is not None
    size = Path(there.metadata_location.removeprefix("file://")).stat().st_size / 1024
    kept = len(there.metadata.snapshots)
    old.close()
    return Measured(store, commits, statistics.median(young_ms), statistics.median(old_ms), kept, size)


class _Feed:
    """A queue of its own that publishes batches, and the table they go to."""

    def __init__(self, home: Path, table: IcebergTable) -> None:
        home.mkdir()
        self.table = table
        self._landing = LeaseQueueResource(url=f"sqlite:///{home}/fabric.db", namespace="landing")
        self._fenced = FencedIOManager(base_path=str(home / "out"), queue=self._landing)
        self._rows = pa.table({"id": range(ROWS), "name": [f"order {n}" for n in range(ROWS)]})

    def timed(self) -> float:
        """Publish a batch, and give the seconds that committing it takes."""
        queue = self._landing.get_queue()
        queue.enqueue(WorkItem("file", "x"))
        batch = LeasedBatch(queue, queue.lease("bench"), lambda text: None)
        self._fenced.publish(dg.build_output_context(asset_key="orders", run_id="bench"), batch, self._rows)
        started = time.perf_counter()
        report = self.table.commit_published(self._fenced, "orders")
        taken = time.perf_counter() - started
        assert report.batches == 1
        return taken

    def close(self) -> None:
        self._landing.get_queue().close()


def _target(measured: Measured) -> Target:
    reached = measured.old_ms / measured.young_ms
    work = f"Iceberg on {measured.store}: commit after {measured.commits} others against the second one"
    return Target(work, f"at most {NEEDED:g}x", reached, "PASS" if reached <= NEEDED else "MISS")


def _show(measured: list[Measured], targets: list[Target], console: Console) -> None:
    table = Table(title="Committing one published batch to an Iceberg table")
    for name in (
        "catalog",
        "earlier commits",
        "young ms",
        "old ms",
        "ratio",
        "snapshots kept",
        "metadata KiB",
        "verdict",
    ):
        table.add_column(name)
    for each, target in zip(measured, targets, strict=True):
        table.add_row(
            each.store, str(each.commits), f"{each.young_ms:.1f}", f"{each.old_ms:.1f}", f"{target.reached:.2f}",
            str(each.snapshots), f"{each.metadata_kib:.0f}", target.verdict,
        )  # fmt: skip
    console.print(table)
