"""Files arrive in the landing folder, and each of them becomes an item of the queue ``landing``, once."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from definitions.orders import write_files
from lease_core import BackpressureActive, WorkItem
from omnirelay_dagster import LeaseQueueResource

FILES_PER_TICK = 8
BURST, BURST_EVERY = 120, 10  # more than the queue's high mark: the first tick, and every tenth
MOST_FILES = 3_000
ENQUEUE_AT_ONCE = 50


class LandingFolder(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where the files arrive."""

    path: str

    def files(self) -> list[Path]:
        return sorted(Path(self.path).glob("*.json"))


@dg.sensor(minimum_interval_seconds=15, default_status=dg.DefaultSensorStatus.RUNNING)
def order_generator(context: dg.SensorEvaluationContext, folder: LandingFolder) -> dg.SensorResult:
    """Stands in for the shop: drops some files every tick, and now and then far more than the queue wants."""
    tick = int(context.cursor or 0)
    there = len(folder.files())
    if there >= MOST_FILES:
        return dg.SensorResult(skip_reason=f"{there} files are enough for a demo; `make clean` starts over")
    new = write_files(Path(folder.path), BURST if tick % BURST_EVERY == 0 else FILES_PER_TICK, first=there)
    return dg.SensorResult(skip_reason=f"{len(new)} files landed, up to {new[-1].name}", cursor=str(tick + 1))


@dg.sensor(minimum_interval_seconds=5, default_status=dg.DefaultSensorStatus.RUNNING)
def landing_files(
    context: dg.SensorEvaluationContext, folder: LandingFolder, landing: LeaseQueueResource
) -> dg.SensorResult:
    """Enqueues every file once.

    The cursor is the last file that was enqueued. Should a tick die before Dagster has stored it, the next one
    enqueues the same files again; the queue knows their ``request_id`` and takes none of them twice.
    """
    new = [path for path in folder.files() if path.name > (context.cursor or "")][:ENQUEUE_AT_ONCE]
    if not new:
        return dg.SensorResult(skip_reason="no new files")
    try:
        landing.get_queue().enqueue([WorkItem("file", str(path), request_id=path.name) for path in new])
    except BackpressureActive:
        return dg.SensorResult(skip_reason=f"backpressure: {len(new)} files wait in the folder until there is room")
    return dg.SensorResult(skip_reason=f"{len(new)} files enqueued", cursor=new[-1].name)
