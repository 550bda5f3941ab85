"""A code location with a leased Spark asset, whose tasks work for as long as a file says, on any master, and with the
Iceberg table of what it published."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import DataFrame

from omnirelay_dagster import FencedIOManager, LeasedBatch, LeaseQueueResource, leased_asset
from omnirelay_dagster.iceberg import IcebergCatalogResource, iceberg_table_asset

HOME = os.environ.get("FABRIC_HOME", ".")
ROWS = 20


@leased_asset(queue="landing", batch_size=100, io_manager_key="fenced")
def bronze(context: dg.AssetExecutionContext, batch: LeasedBatch, pyspark: LazyPySparkResource) -> DataFrame:
    """Twenty rows an item, made by tasks that say who they are and wait until they may go on."""
    home = HOME

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        Path(home, "tasks", f"{os.getpid()}-{time.time_ns()}").touch()
        while Path(home, "wait").exists():
            time.sleep(0.05)
        yield from batches

    spark = pyspark.spark_session
    Path(home, "body").write_text(str(os.getpid()))
    context.log.info(f"on application {spark.conf.get('spark.app.id')}")
    rows = batch.to_spark(spark).selectExpr("sequence_id", f"explode(sequence(1, {ROWS})) AS n")
    return rows.repartition(4, "n").mapInArrow(work, rows.schema)


table = iceberg_table_asset("lake.bronze", source=bronze)

landing = LeaseQueueResource(
    url=f"sqlite:///{HOME}/fabric.db", namespace="landing", lease_duration=10.0, retry_delay=0.0
)
defs = dg.Definitions(
    assets=[bronze, table],
    jobs=[
        dg.define_asset_job("work", [bronze], executor_def=dg.multiprocess_executor),
        dg.define_asset_job("work_again", [bronze]),
        dg.define_asset_job("work_and_commit", [bronze, table]),
    ],
    executor=dg.in_process_executor,  # a process for the step beside the run's own, where one of them is to be killed
    resources={
        "landing": landing,
        "catalog": IcebergCatalogResource(url=f"sqlite:///{HOME}/catalog.db", warehouse=f"{HOME}/lake"),
        "fenced": FencedIOManager(base_path=f"{HOME}/out", queue=landing),
        "pyspark": LazyPySparkResource(spark_config=json.loads(os.environ.get("FABRIC_SPARK", "{}"))),
    },
)
