"""Drives the demo fabric in this process: its sensors are ticked and its jobs run one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd

from definitions.bronze import MOST_BYTES
from definitions.by_hand import FabricByHand
from definitions.findings import by_assets, by_iceberg
from definitions.tally import Tally, tally


class Driver(FabricByHand):
    def __init__(self, home: Path, instance: dg.DagsterInstance) -> None:
        super().__init__(home)
        self.instance = instance
        self.landing = home / "landing"
        self.landing.mkdir(exist_ok=True)

    def close(self) -> None:
        for name in ("landing", "refine", "days"):
            self.queue(name).close()

    def run(self, job: str, **config: Any) -> None:
        run_config = {"ops": {"bronze_orders": {"config": config}}} if config else None
        assert self.defs.resolve_job_def(job).execute_in_process(instance=self.instance, run_config=run_config).success

    def bronze(self, files: Mapping[str, bytes] | None = None, **config: Any) -> pd.DataFrame:
        """Let these files land, and make bronze of whatever is there. Gives all that bronze has."""
        for name, data in (files or {}).items():
            (self.landing / name).write_bytes(data)
        self.tick("landing_files")
        self.run("load_bronze", **config)
        found: pd.DataFrame = self.resources["bronze_io"].load("bronze_orders", pd.DataFrame, allow_empty=True)
        return found

    def refine(self) -> None:
        """From what bronze has published on, to the end."""
        self.tick("bronze_batches")
        self.run("refine_silver")
        self.tick("touched_days")
        self.run("compute_gold")

    def silver(self) -> pd.DataFrame:
        found: pd.DataFrame = self.resources["silver_io"].load("silver_orders", pd.DataFrame)
        return found

    def by_assets(self) -> Tally:
        return by_assets(self.queue(), self._stored)

    def _stored(self, asset: str) -> pd.DataFrame:
        found: pd.DataFrame = self.defs.load_asset_value(asset, python_type=pd.DataFrame, instance=self.instance)
        return found

    def by_iceberg(self) -> Tally:
        return by_iceberg(self.queue(), self.resources)

    def by_files(self) -> Tally:
        return tally(self.landing, MOST_BYTES)

    def left(self) -> dict[str, int]:
        """What still waits or is held, by queue. Empty when all is done."""
        stats = {name: self.queue(name).stats() for name in ("landing", "refine", "days")}
        return {name: n for name, each in stats.items() if (n := each.pending + each.active)}
