"""The same small work both ways: a draining leased asset, and an asset with a dynamic partition and a run an item.

Each has the sensor that goes with it. Items of the queue are taken by the work sensor; names in the landing folder
get a partition and a run request each, from a sensor as people write it today.
"""

# without `from __future__ import annotations`: Dagster must see the class of a context, not its name
import os
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.in_dagster.overhead import QUIET
from omnirelay_dagster import LeaseQueueResource, build_work_sensor, leased_asset

HOME = Path(os.environ.get("OMNIRELAY_BENCH_HOME", "."))
LANDING = HOME / "landing"
LEDGER = HOME / "ledger.txt"
BATCH = 1_000

bench = LeaseQueueResource(url=f"sqlite:///{HOME}/draining.db", namespace="bench", durability="full")
files = dg.DynamicPartitionsDefinition(name="files")


def work_on(names: list[str]) -> None:
    """Far less than anybody's work, so that what is measured is the way to it."""
    with LEDGER.open("a") as ledger:
        ledger.writelines(f"{name}\n" for name in names)


@leased_asset(queue="bench", batch_size=BATCH, drain=True)
def drained(batch: Any) -> None:
    work_on([item.resource_id for item in batch.items])


@dg.asset(partitions_def=files)
def one_by_one(context: dg.AssetExecutionContext) -> None:
    work_on([context.partition_key])


drain = dg.define_asset_job("drain", [drained], config=QUIET)
run_an_item = dg.define_asset_job("run_an_item", [one_by_one], partitions_def=files, config=QUIET)


@dg.sensor(job=run_an_item, minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def landing_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
    new = [name for name in sorted(os.listdir(LANDING)) if name > (context.cursor or "")]
    return dg.SensorResult(
        run_requests=[dg.RunRequest(partition_key=name) for name in new],
        dynamic_partitions_requests=[files.build_add_request(new)],
        cursor=new[-1] if new else context.cursor,
    )


defs = dg.Definitions(
    assets=[drained, one_by_one],
    jobs=[drain, run_an_item],
    sensors=[landing_sensor, build_work_sensor("bench", job=drain, items_per_run=10**9, minimum_interval_seconds=1)],
    resources={"bench": bench},
    executor=dg.in_process_executor,
)
