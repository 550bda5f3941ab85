"""What the fabric says, in the same terms as the independent tally: once by its assets, once by its Iceberg tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd

from definitions.fabric import SOURCES
from definitions.gold import revenue_by_day, revenue_by_product
from definitions.quarantine import problems, put_aside
from definitions.tally import Tally
from lease_core import LeaseQueue


def by_assets(landing: LeaseQueue, load: Callable[[str], pd.DataFrame]) -> Tally:
    """As the assets were stored."""
    return _tally(
        landing,
        *(load(name) for name in ("bronze_orders", "silver_orders", "quarantine", "daily_revenue", "top_products")),
    )


def by_iceberg(landing: LeaseQueue, resources: Mapping[str, Any]) -> Tally:
    """As anybody reads it who knows the tables only."""
    names = [source.key.path[-1] for source in SOURCES.values()]
    tables = [resources["catalog"].table(f"lake.{name}") for name in names]
    bronze, silver, sales = (table.scan().to_arrow().to_pandas() for table in tables)
    aside = put_aside(bronze, landing)
    return _tally(landing, bronze, silver, aside, revenue_by_day(sales), revenue_by_product(sales))


def revenue_of_versions(silver: pd.DataFrame) -> Any:
    """What silver alone comes to: the latest version of each order, if it was not cancelled."""
    orders = silver.sort_values("updated_at").drop_duplicates("order_id", keep="last")
    return orders.loc[orders["status"] != "cancelled", "worth"].sum()


def _tally(
    landing: LeaseQueue,
    bronze: pd.DataFrame,
    silver: pd.DataFrame,
    aside: pd.DataFrame,
    revenue: pd.DataFrame,
    products: pd.DataFrame,
) -> Tally:
    stats = landing.stats()
    doubled = int(silver.duplicated(["order_id", "updated_at"]).sum())
    return Tally(
        files=stats.completed + stats.dead,
        records=int((bronze["order_id"].notna() | bronze["raw"].notna()).sum()),
        problems=problems(aside),
        orders=int(silver["order_id"].nunique()) + doubled,
        revenue={(str(day), name): (int(n), worth) for day, name, n, worth in _rows(revenue, "day", "category")},
        products={name: worth for name, _, _, worth in sorted(_rows(products, "product", "category"))},
    )


def _rows(frame: pd.DataFrame, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(frame[name] for name in (*names, "orders", "revenue")), strict=True)
