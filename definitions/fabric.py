"""The demo fabric as a Dagster code location: `make dev`.

Order files land in a folder and are enqueued once each. Three leased assets on Spark turn them into bronze, silver and
gold, each working from a queue of its own; sensors hand over what one has published to the next. What they publish is
committed to Iceberg tables, and the governance tables say how the work went. All of it runs on SQLite and local files.

    order_generator -> landing/ -> landing_files -> [landing] -> bronze_orders -> bronze_batches -> [refine]
    -> silver_orders -> touched_days -> [days] -> daily_sales -> daily_revenue, top_products
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from definitions.arrivals import LandingFolder, landing_files, order_generator
from definitions.bronze import bronze_orders
from definitions.gold import daily_revenue, daily_sales, top_products
from definitions.handing_over import bronze_batches, touched_days
from definitions.quarantine import quarantine
from definitions.silver import silver_orders
from omnirelay_dagster import FencedIOManager, LeaseQueueResource, check_definitions, lease_queue_definitions
from omnirelay_dagster.doctor import prepare_environment
from omnirelay_dagster.iceberg import IcebergCatalogResource, build_iceberg_sensor, iceberg_table_asset
from omnirelay_dagster.spark.governance import governance_assets

ON = dg.DefaultSensorStatus.RUNNING
LEASE = 15.0  # seconds: a killed run's work is taken over soon, and a busy machine still gets its heartbeats through

SPARK = {
    "spark.master": "local[*]",
    "spark.app.name": "omnirelay-demo",
    "spark.driver.memory": "1g",
    # little data and many plans: compiling them would take longer than running them
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}

VIEWS = dg.AssetSelection.assets(daily_revenue, top_products, quarantine)
SOURCES = {"bronze": bronze_orders, "silver": silver_orders, "gold": daily_sales}


def queues(home: Path) -> dict[str, LeaseQueueResource]:
    """Files, batches of bronze and days, in one database. Of the latter two, one lease at a time for each key."""
    url = f"sqlite:///{home}/fabric.db"
    shared: dict[str, Any] = {"url": url, "lease_duration": LEASE}
    return {
        "landing": LeaseQueueResource(namespace="landing", high_watermark=60, low_watermark=20, **shared),
        "refine": LeaseQueueResource(namespace="refine", exclusive="partition", **shared),
        "days": LeaseQueueResource(namespace="days", exclusive="partition", **shared),
    }


def fabric(home: Path) -> dg.Definitions:
    """The fabric with its data in the folder ``home``."""
    prepare_environment()
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    by_name = queues(home)
    spark = LazyPySparkResource(spark_config=SPARK)
    leased = zip(SOURCES, by_name.values(), strict=True)
    tables = {
        level: iceberg_table_asset(
            f"lake.{source.key.path[-1]}", source=source, io_manager=f"{level}_io", group_name="lake"
        )
        for level, source in SOURCES.items()
    }
    governance = governance_assets(queue="landing", spark="pyspark", storage=home / "governance")
    own = dg.Definitions(
        assets=[*SOURCES.values(), daily_revenue, top_products, quarantine, *tables.values(), governance],
        jobs=_jobs(tables, governance),
        schedules=[_every_five_minutes(governance)],
        sensors=[
            *(order_generator, landing_files, bronze_batches, touched_days),
            *(build_iceberg_sensor(table, minimum_interval_seconds=60, default_status=ON) for table in tables.values()),
            dg.AutomationConditionSensorDefinition("views_sensor", target=VIEWS, default_status=ON),
        ],
        resources={
            **by_name,
            "pyspark": spark,
            "folder": LandingFolder(path=str(home / "landing")),
            "catalog": IcebergCatalogResource(url=f"sqlite:///{home}/catalog.db", warehouse=str(home / "lake")),
            "io_manager": dg.FilesystemIOManager(base_dir=str(home / "views")),
            **{
                f"{level}_io": FencedIOManager(base_path=str(home / "published"), queue=queue, spark=spark)
                for level, queue in leased
            },
        },
        executor=dg.in_process_executor,  # steps of a run share its Spark; every run has a process of its own
    )
    return check_definitions(dg.Definitions.merge(own, *(_around(name) for name in by_name)))


def _jobs(tables: dict[str, dg.AssetsDefinition], governance: dg.AssetsDefinition) -> list[Any]:
    lake = dg.AssetSelection.assets(*tables.values())
    return [
        dg.define_asset_job("load_bronze", dg.AssetSelection.assets(bronze_orders)),
        dg.define_asset_job("refine_silver", dg.AssetSelection.assets(silver_orders)),
        dg.define_asset_job("compute_gold", dg.AssetSelection.assets(daily_sales)),
        dg.define_asset_job("show_results", VIEWS | lake),
        dg.define_asset_job("govern", dg.AssetSelection.assets(governance)),
    ]


def _every_five_minutes(governance: dg.AssetsDefinition) -> dg.ScheduleDefinition:
    return dg.ScheduleDefinition(
        name="governance_schedule",
        target=governance,
        cron_schedule="*/5 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
    )


def _around(queue: str) -> dg.Definitions:
    """A queue's own asset, checks, jobs and sensors. Only landing has a feed that can be held back."""
    feed: dict[str, Any] = {
        "backpressure": {"pause_sensors": ["order_generator"], "minimum_interval_seconds": 5},
        "replication": {"granularity": "resource_type", "event_types": ["Completed", "DeadLettered"]},
    }
    asset = dict(zip(("landing", "refine", "days"), SOURCES.values(), strict=True))[queue]
    return lease_queue_definitions(
        queue=queue,
        asset=asset,
        observe_every=10,
        default_status=ON,
        work={"items_per_run": 200, "minimum_interval_seconds": 5},
        run_status={"report_dead_runs": True, "grace_seconds": 60},
        **(feed if queue == "landing" else {}),
    )


defs = fabric(Path(os.environ.get("FABRIC_HOME", ".demo")))
