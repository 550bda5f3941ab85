"""Drives the demo fabric in this process: its sensors are ticked and its jobs run one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd

from definitions.bronze import MOST_BYTES
from definitions.fabric import fabric
from definitions.fabric_demo import SENSORS
from definitions.findings import by_assets, by_iceberg
from definitions.tally import Tally, tally
from lease_core import LeaseQueue


class Driver:
    def __init__(self, home: Path, instance: dg.DagsterInstance) -> None:
        self.home, self.instance = home, instance
        self.landing = home / "landing"
        self.landing.mkdir(exist_ok=True)
        self.defs = fabric(home)
        self.resources = dict(self.defs.resources or {})
        self.cursors: dict[str, str | None] = dict.fromkeys(SENSORS)

    def close(self) -> None:
        for name in ("landing", "refine", "days"):
            self.queue(name).close()

    def queue(self, name: str = "landing") -> LeaseQueue:
        found: LeaseQueue = self.resources[name].get_queue()
        return found

    def tick(self, name: str) -> str:
        """One tick of a sensor that enqueues; what it says. Its cursor is kept, as the daemon would."""
        sensor, needs = SENSORS[name]
        resources = {key: self.resources[key] for key in needs}
        with dg.build_sensor_context(cursor=self.cursors[name], resources=resources) as context:
            result: Any = sensor(context)
        self.cursors[name] = result.cursor or self.cursors[name]
        return str(result.skip_reason.skip_message)

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
        return {name: n for name, each in stats.items() if (n := each.pending + each.active + each.delayed)}
