"""A queue, a fenced IO manager and a table in one folder, and batches to put into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pyarrow as pa

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.iceberg import IcebergTable
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.manifest import Published
from omnirelay_dagster.resource import LeaseQueueResource

ASSET = "bronze"
NAMESPACE = "landing"


class Lake:
    """All of it under ``home``; opened again, by whichever process, it is the same lake."""

    def __init__(self, home: Path, catalog: str | None = None, namespace: str = NAMESPACE) -> None:
        self.home = home
        self.catalog_url = catalog or f"sqlite:///{home}/catalog.db"
        url = f"sqlite:///{home}/fabric.db"
        self.landing = LeaseQueueResource(url=url, namespace=namespace, retry_delay=0.0, lease_duration=600.0)
        self.fenced = FencedIOManager(base_path=str(home / "out"), queue=self.landing)

    @property
    def queue(self) -> LeaseQueue:
        return self.landing.get_queue()

    def table(self, catalog: Any = None, **options: Any) -> IcebergTable:
        return IcebergTable("lake.orders", catalog or self.catalog_url, self.home / "lake", **options)

    def take(self) -> LeasedBatch:
        self.queue.enqueue([WorkItem("file", "x")])
        return LeasedBatch(self.queue, self.queue.lease("worker"), lambda text: None)

    def publish(self, value: Any, asset: str = ASSET) -> Published:
        """One item comes in, is leased, and its output published."""
        context = dg.build_output_context(asset_key=asset, run_id="run")
        published = self.fenced.publish(context, self.take(), value)
        assert published is not None
        return published

    def publish_folder(self, write: Any, rows: int | None = None, asset: str = ASSET) -> int:
        """Publish a folder of part files, as Spark's executors write one. Gives its number in the log."""
        batch = self.take()
        lease = f"{batch.id}-{batch.leases[0].token.fence}"
        folder = self.home / "out" / asset / "_" / lease / "part-0.parquet"
        write(folder)
        self.complete(batch, folder, rows, asset)
        return self.queue.stats().head

    def complete(self, batch: LeasedBatch, folder: Path, rows: int | None, asset: str) -> None:
        fence = batch.leases[0].token.fence
        path = str(folder.relative_to(self.home / "out"))
        result = {"kind": "omnirelay.output", "asset": asset, "partition": None, "uri": f"file://{folder}"}
        result |= {"path": path, "format": "spark", "rows": rows, "bytes": 0, "fence": fence, "run": "run"}
        from omnirelay_dagster.manifest import manifest_of

        manifest_of(batch.queue).keep_log(batch.queue)
        batch.complete(result)

    def close(self) -> None:
        self.queue.close()


def numbered(batch: int, rows: int = 3) -> pa.Table:
    """A batch that Iceberg takes as it is."""
    return pa.table({"batch": pa.array([batch] * rows, pa.int64()), "row": pa.array(range(rows), pa.int64())})


def framed(batch: int, rows: int = 3) -> pd.DataFrame:
    """The same from pandas, with times in nanoseconds, which Iceberg does not take as they are."""
    at = pd.date_range("2026-01-01", periods=rows, freq="h")
    return pd.DataFrame({"batch": [batch] * rows, "row": range(rows), "at": at})


def pairs(table: IcebergTable, **scan: Any) -> list[tuple[int, int]]:
    """Every row of the table by its batch and its number in it, sorted; a row that is there twice is twice here."""
    rows = table.scan(selected_fields=("batch", "row"), **scan).to_arrow().to_pylist()
    return sorted((row["batch"], row["row"]) for row in rows)


def expected(batches: int, rows: int = 3) -> list[tuple[int, int]]:
    return [(batch, row) for batch in range(batches) for row in range(rows)]
