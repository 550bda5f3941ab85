"""Gold: what was sold, by day, category and product, and two small tables of it.

An item of the queue ``days`` is a day of which silver has something new; its partition key is the day, and the queue is
exclusive by partition. So a day is computed by one lease at a time, from all that silver has published by then, and
what was published of it last is right.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import dagster as dg
import pandas as pd
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.window import Window

from definitions.silver import silver_orders
from lease_core import WorkItem
from omnirelay_dagster import LeasedBatch, leased_asset


def day_item(day: str, upto: int) -> WorkItem:
    """A day to be computed again, since silver has something new of it up to this number of its log."""
    return WorkItem("day", day, partition_key=day, request_id=f"{day}@{upto}")


@leased_asset(
    queue="days",
    batch_size=100,
    drain=True,
    max_seconds=120,
    deps=[silver_orders],
    required_resource_keys={"silver_io", "pyspark"},
    io_manager_key="gold_io",
    group_name="orders",
    kinds={"spark", "gold"},
)
def daily_sales(context: dg.AssetExecutionContext, batch: LeasedBatch) -> DataFrame:
    """The leased days, computed anew. A day may be here many times; the one with the highest ``version`` counts."""
    batch.spark_group(context.resources.pyspark)
    days = sorted(item.resource_id for item in batch.items)
    orders = context.resources.silver_io.load("silver_orders", DataFrame)
    sold = sales(orders.where(f.col("day").isin([date.fromisoformat(day) for day in days])))
    return sold.withColumn("version", f.lit(max(lease.token.fence for lease in batch.leases)).cast("bigint"))


def sales(versions: DataFrame) -> DataFrame:
    """Orders as they are by now, added up. Cancelled ones are worth nothing, but their day stays."""
    newest = Window.partitionBy("order_id").orderBy(f.desc("updated_at"))
    orders = versions.withColumn("place", f.row_number().over(newest)).where("place = 1")
    kept = f.col("status") != "cancelled"
    return orders.groupBy("day", "category", "product").agg(
        f.count("*").alias("orders_placed"),
        f.count_if(kept).alias("orders"),
        f.sum(f.when(kept, f.col("quantity")).otherwise(0)).cast("bigint").alias("units"),
        f.sum(f.when(kept, f.col("worth")).otherwise(0)).cast("decimal(28,2)").alias("revenue"),
    )


# Small enough for a plain process: no lease, and no Spark


@dg.asset(group_name="orders", kinds={"pandas", "gold"}, automation_condition=dg.AutomationCondition.eager())
def daily_revenue(daily_sales: pd.DataFrame) -> dg.Output[pd.DataFrame]:
    """Orders that were not cancelled, and what they are worth, by day (UTC) and category."""
    found = revenue_by_day(daily_sales)
    total = sum(found["revenue"], Decimal(0))
    return dg.Output(found, metadata={"days": found["day"].nunique(), "revenue": float(total)})


@dg.asset(group_name="orders", kinds={"pandas", "gold"}, automation_condition=dg.AutomationCondition.eager())
def top_products(daily_sales: pd.DataFrame) -> dg.Output[pd.DataFrame]:
    """Products by what they brought in over all days, the best first."""
    found = revenue_by_product(daily_sales)
    return dg.Output(found, metadata={"products": len(found), "first": ", ".join(found["product"].head(3))})


def latest(daily_sales: pd.DataFrame) -> pd.DataFrame:
    """Of each day what was published last."""
    return daily_sales[daily_sales["version"] == daily_sales.groupby("day")["version"].transform("max")]


def revenue_by_day(daily_sales: pd.DataFrame) -> pd.DataFrame:
    return _summed(daily_sales, ["day", "category"]).reset_index(drop=True)


def revenue_by_product(daily_sales: pd.DataFrame) -> pd.DataFrame:
    found = _summed(daily_sales, ["product", "category"])
    return found.sort_values(["revenue", "product"], ascending=[False, True]).reset_index(drop=True)


def _summed(daily_sales: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    found = latest(daily_sales).groupby(by, as_index=False)[["orders", "units", "revenue"]].sum()
    return found[found["orders"] > 0]
