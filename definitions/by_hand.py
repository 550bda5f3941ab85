"""The fabric in one process: its queues at hand, and its sensors ticked by hand rather than by Dagster's daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg

from definitions.arrivals import landing_files
from definitions.fabric import fabric
from definitions.handing_over import bronze_batches, touched_days
from lease_core import LeaseQueue

SENSORS = {
    "landing_files": (landing_files, ("folder", "landing")),
    "bronze_batches": (bronze_batches, ("bronze_io", "refine")),
    "touched_days": (touched_days, ("silver_io", "days")),
}
"""The sensors that enqueue, each with the resources it needs."""


class FabricByHand:
    """The fabric below ``home``, which remembers the cursors of its sensors."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.defs = fabric(home)
        self.resources = dict(self.defs.resources or {})
        self.cursors: dict[str, str | None] = dict.fromkeys(SENSORS)

    def queue(self, name: str = "landing") -> LeaseQueue:
        found: LeaseQueue = self.resources[name].get_queue()
        return found

    def tick(self, name: str) -> str:
        """One tick of a sensor that enqueues, as Dagster's daemon would do it. Gives what it says."""
        sensor, needs = SENSORS[name]
        resources = {key: self.resources[key] for key in needs}
        with dg.build_sensor_context(cursor=self.cursors[name], resources=resources) as context:
            result: Any = sensor(context)
        self.cursors[name] = result.cursor or self.cursors[name]
        return str(result.skip_reason.skip_message)
