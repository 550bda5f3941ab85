"""The demo fabric as a Dagster code location: `make dev`.

Order files land in a folder. A sensor puts each of them into the queue once, `bronze_orders` leases them in batches,
and what it publishes is refined by two plain assets. Every part of it runs on SQLite and local files.

    order_generator -> landing/ -> landing_files -> queue "landing" -> bronze_orders -> silver_orders -> daily_revenue
"""

from __future__ import annotations

import json
import os
import time
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd

from definitions.orders import write_files
from lease_core import BackpressureActive, WorkItem
from omnirelay_dagster import FencedIOManager, LeasedBatch, LeaseQueueResource, lease_queue_definitions, leased_asset

FILES_PER_TICK = 8
BURST, BURST_EVERY = 120, 10  # more than the queue's high mark: the first tick, and every tenth
MOST_FILES = 3_000
ENQUEUE_AT_ONCE = 50

ON = dg.DefaultSensorStatus.RUNNING


class LandingFolder(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Where the files arrive."""

    path: str

    def files(self) -> list[Path]:
        return sorted(Path(self.path).glob("*.json"))


# Files arrive, and are enqueued


@dg.sensor(minimum_interval_seconds=15, default_status=ON)
def order_generator(context: dg.SensorEvaluationContext, folder: LandingFolder) -> dg.SensorResult:
    """Stands in for the shop: drops some files every tick, and now and then far more than the queue wants."""
    tick = int(context.cursor or 0)
    there = len(folder.files())
    if there >= MOST_FILES:
        return dg.SensorResult(skip_reason=f"{there} files are enough for a demo; `make clean` starts over")
    new = write_files(Path(folder.path), BURST if tick % BURST_EVERY == 0 else FILES_PER_TICK, first=there)
    return dg.SensorResult(skip_reason=f"{len(new)} files landed, up to {new[-1].name}", cursor=str(tick + 1))


@dg.sensor(minimum_interval_seconds=5, default_status=ON)
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


# Bronze, silver, gold


class BronzeConfig(dg.Config):
    seconds_per_file: float = 0.25
    """The demo's files are read at once. This makes it look like work, so that there is something to see or to kill."""


@leased_asset(
    queue="landing",
    batch_size=10,
    drain=True,
    max_seconds=60,
    io_manager_key="bronze_io_manager",
    group_name="orders",
    kinds={"pandas", "bronze"},
)
def bronze_orders(context: dg.AssetExecutionContext, config: BronzeConfig, batch: LeasedBatch) -> pd.DataFrame | None:
    """The events as they came, one row each, with what is wrong with them. A file that is no JSON fails alone."""
    rows: list[dict[str, Any]] = []
    for done, lease in enumerate(batch, start=1):
        time.sleep(config.seconds_per_file)
        path = Path(lease.item.resource_id)
        try:
            rows += [bronze_row(event, path.name) for event in json.loads(path.read_text())]
        except json.JSONDecodeError as error:
            batch.fail(lease, error, requeue=False)  # it will be no better next time: to the dead letters with it
            context.log.warning(f"{path.name} is not JSON: {error}")
        batch.progress(done)
    return pd.DataFrame(rows) if rows else None


def bronze_row(event: dict[str, Any], file: str) -> dict[str, Any]:
    row = {**event, "amount": str(event["amount"]), "file": file, "cents": 0, "problem": ""}
    try:
        row["cents"] = cents(event["amount"])
    except ValueError as error:
        row["problem"] = str(error)
    return row


def cents(amount: Any) -> int:
    """Shops send 1250 (cents) or "12.50"."""
    try:
        value = int(amount if isinstance(amount, int) else Decimal(amount) * 100)
    except (InvalidOperation, TypeError) as error:
        raise ValueError(f"the amount {amount!r} is not a number") from error
    if value < 0:
        raise ValueError(f"the amount {amount!r} is negative")
    return value


@dg.asset(group_name="orders", kinds={"pandas", "silver"}, automation_condition=dg.AutomationCondition.eager())
def silver_orders(bronze_orders: pd.DataFrame) -> dg.Output[pd.DataFrame]:
    """One row an order, as its latest revision has it, with conformed country, time and amount."""
    good = bronze_orders[bronze_orders["problem"] == ""]
    latest = good.sort_values(["order_id", "revision"]).drop_duplicates("order_id", keep="last")
    orders = pd.DataFrame(
        {
            "order_id": latest["order_id"],
            "placed_at": pd.to_datetime(latest["placed_at"], utc=True, format="ISO8601"),
            "country": latest["country"].str.strip().str.upper(),
            "status": latest["status"],
            "cents": latest["cents"],
        }
    ).reset_index(drop=True)
    counts = {"records": len(bronze_orders), "bad_records": len(bronze_orders) - len(good), "orders": len(orders)}
    return dg.Output(orders, metadata=counts)


@dg.asset(group_name="orders", kinds={"pandas", "gold"}, automation_condition=dg.AutomationCondition.eager())
def daily_revenue(silver_orders: pd.DataFrame) -> dg.Output[pd.DataFrame]:
    """Orders that were not cancelled, and what they are worth, by day (UTC)."""
    sold = silver_orders[silver_orders["status"] != "cancelled"]
    days = sold["placed_at"].dt.strftime("%Y-%m-%d").rename("day")
    revenue = sold.groupby(days).agg(orders=("order_id", "count"), cents=("cents", "sum")).reset_index()
    return dg.Output(revenue, metadata={"days": len(revenue), "revenue": float(revenue["cents"].sum() / 100)})


# All of it together


def fabric(home: Path) -> dg.Definitions:
    """The fabric with its data in the folder ``home``."""
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    landing = LeaseQueueResource(
        url=f"sqlite:///{home}/fabric.db",
        namespace="landing",
        lease_duration=5.0,
        high_watermark=60,
        low_watermark=20,
    )
    refined = dg.AssetSelection.assets(silver_orders, daily_revenue)
    own = dg.Definitions(
        assets=[bronze_orders, silver_orders, daily_revenue],
        jobs=[
            dg.define_asset_job("load_bronze", dg.AssetSelection.assets(bronze_orders)),
            dg.define_asset_job("refine", refined),
        ],
        sensors=[
            order_generator,
            landing_files,
            dg.AutomationConditionSensorDefinition("refine_sensor", target=refined, default_status=ON),
        ],
        resources={
            "landing": landing,
            "folder": LandingFolder(path=str(home / "landing")),
            "bronze_io_manager": FencedIOManager(base_path=str(home / "bronze"), queue=landing),
            "io_manager": dg.FilesystemIOManager(base_dir=str(home / "refined")),
        },
        executor=dg.in_process_executor,  # the steps are small; every run still has a process of its own
    )
    queue = lease_queue_definitions(
        queue="landing",
        asset=bronze_orders,
        observe_every=10,
        default_status=ON,
        work={"items_per_run": 200, "minimum_interval_seconds": 5},
        run_status={"report_dead_runs": True, "grace_seconds": 60},
        backpressure={"pause_sensors": ["order_generator"], "minimum_interval_seconds": 5},
    )
    return dg.Definitions.merge(own, queue)


defs = fabric(Path(os.environ.get("FABRIC_HOME", ".demo")))
