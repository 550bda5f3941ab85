"""Silver: orders with conformed values, each version of an order once.

An item of the queue ``refine`` is a batch that bronze has published. The queue is exclusive by partition and all items
have the same one, so that batches are refined one at a time: what is compared with what silver has already is complete,
and whoever lost his lease cannot publish any more.
"""

from __future__ import annotations

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.window import Window

from definitions.bronze import bronze_orders
from lease_core import Lease, WorkItem
from omnirelay_dagster import FencedIOManager, LeasedBatch, leased_asset
from omnirelay_dagster.manifest import Published

ONE_AT_A_TIME = "orders"


def batch_item(published: Published) -> WorkItem:
    """A published batch of bronze as work for silver. It is the same work however often it is enqueued."""
    return WorkItem(
        "bronze_batch",
        published.path,
        partition_key=ONE_AT_A_TIME,
        request_id=published.lease_id,
        attributes={"sequence_number": str(published.sequence_number)},
    )


@leased_asset(
    queue="refine",
    batch_size=1,
    drain=True,
    max_seconds=120,
    deps=[bronze_orders],
    required_resource_keys={"bronze_io", "silver_io", "pyspark"},
    io_manager_key="silver_io",
    group_name="orders",
    kinds={"spark", "silver"},
)
def silver_orders(context: dg.AssetExecutionContext, batch: LeasedBatch) -> DataFrame:
    """Versions of orders that were not there yet. The latest ``updated_at`` of an ``order_id`` is what counts."""
    batch.spark_group(context.resources.pyspark)
    [lease] = batch.leases
    known = context.resources.silver_io.load("silver_orders", DataFrame, allow_empty=True)
    return new_versions(conformed(bronze_batch(context.resources.bronze_io, lease)), known)


def bronze_batch(bronze_io: FencedIOManager, lease: Lease) -> DataFrame:
    """The one batch of bronze that a lease is about."""
    number = int(lease.item.attributes["sequence_number"])
    frame: DataFrame = bronze_io.load("bronze_orders", DataFrame, after=number - 1, as_of=number)
    return frame


def conformed(records: DataFrame) -> DataFrame:
    """Good records, in the words that we use. Days are UTC's, whatever the session's time zone."""
    return records.where("problems IS NULL").select(
        "order_id",
        "updated_at",
        "placed_at",
        f.expr("date_from_unix_date(CAST(floor(unix_micros(placed_at) / 86400000000) AS int))").alias("day"),
        f.upper(f.trim("country")).alias("country"),
        "status",
        f.lower(f.trim("category")).alias("category"),
        f.trim("product").alias("product"),
        "quantity",
        "price",
        (f.col("quantity") * f.col("price")).cast("decimal(24,2)").alias("worth"),
        "file",
    )


def new_versions(orders: DataFrame, known: DataFrame) -> DataFrame:
    """Of each order the latest version of this batch, unless that or a later one is known."""
    newest = Window.partitionBy("order_id").orderBy(f.desc("updated_at"), "file")
    latest = orders.withColumn("place", f.row_number().over(newest)).where("place = 1").drop("place")
    if not known.columns:
        return latest
    days = [row.day for row in latest.select("day").distinct().collect()]
    there = known.where(f.col("day").isin(days)).groupBy("order_id").agg(f.max("updated_at").alias("known_at"))
    return latest.join(there, "order_id", "left").where("known_at IS NULL OR known_at < updated_at").drop("known_at")
