"""A small busy fabric to take pictures of: a queue that breathes, runs that hold leases, a poison file, and a zombie.

``SCREENSHOTS_HOME`` is where its queue, outputs and notes to ``take.py`` are.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import dagster as dg

from lease_core import Lease, WorkItem
from omnirelay_dagster import (
    FencedIOManager,
    LeasedBatch,
    LeaseQueueResource,
    build_work_sensor,
    lease_queue_definitions,
    leased_asset,
)
from omnirelay_dagster.type_handlers import JsonHandler, TypeHandler

HOME = Path(os.environ["SCREENSHOTS_HOME"])
STOPPED, TAKEN_OVER = HOME / "stopped.pid", HOME / "taken-over"

url = f"sqlite:///{HOME}/fabric.db"
landing = LeaseQueueResource(url=url, namespace="landing", lease_duration=30.0, max_attempts=1)
exports = LeaseQueueResource(url=url, namespace="exports", lease_duration=4.0, retry_delay=0, max_attempts=5)


@leased_asset(queue="landing", batch_size=12, per_item=True, drain=True, group_name="orders")
def bronze_orders(lease: Lease) -> None:
    """Order files as they land."""
    time.sleep(random.uniform(0.5, 1.5))
    if "corrupt" in lease.item.resource_id:
        raise ValueError("not JSON: unexpected end of file at line 1")


@leased_asset(queue="exports", io_manager_key="fenced", group_name="orders")
def daily_export(context: dg.AssetExecutionContext, batch: LeasedBatch) -> list[str]:
    """Its first run is stopped as it stores its output, for longer than its lease lasts, and then goes on."""
    context.log.info(f"exporting {batch.items[0].resource_id}, attempt {batch.leases[0].token.attempt}")
    if STOPPED.exists():
        TAKEN_OVER.touch()
    return [item.resource_id for item in batch.items]


class StoppedOnce(JsonHandler):
    """Writes as ever, but the first process that does is stopped right after it, before it can publish."""

    def write(self, value: Any, fs: Any, path: str) -> int | None:
        rows = super().write(value, fs, path)
        if not STOPPED.exists():
            STOPPED.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return rows


class Exports(FencedIOManager):
    handlers: ClassVar[tuple[TypeHandler, ...]] = (StoppedOnce(),)


@dg.sensor(minimum_interval_seconds=2, default_status=dg.DefaultSensorStatus.RUNNING)
def landing_files(context: dg.SensorEvaluationContext, landing: LeaseQueueResource, exports: LeaseQueueResource):
    """Enqueues as many files as it likes, now more, now less; some of the first are corrupt."""
    number = int(context.cursor or 0)
    count = random.choice([0, 10, 40]) if landing.get_queue().stats().pending < 120 else 0
    names = [f"orders-{number + n:05d}{'-corrupt' if number + n in (3, 9) else ''}.json" for n in range(count)]
    if names:
        landing.get_queue().enqueue([WorkItem("file", f"s3://raw/orders/{name}") for name in names])
    if context.cursor is None:
        exports.get_queue().enqueue([WorkItem("day", "2026-03-14")])
    return dg.SensorResult(cursor=str(number + len(names)), skip_reason=f"{len(names)} files landed")


often = {"minimum_interval_seconds": 2}
defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[bronze_orders, daily_export],
        sensors=[
            landing_files,
            build_work_sensor("exports", target=daily_export, max_concurrent_runs=2, **often),
        ],
        resources={
            "landing": landing,
            "exports": exports,
            "fenced": Exports(base_path=str(HOME / "exports"), queue=exports),
        },
        executor=dg.in_process_executor,
    ),
    lease_queue_definitions(
        queue="landing",
        asset=bronze_orders,
        observe_every=3,
        work={"max_concurrent_runs": 3, "items_per_run": 20, **often},
    ),
)
