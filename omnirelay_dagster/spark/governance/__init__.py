"""What the log tells about the work: item histories, who did what, latencies, and what stands out.

governance_assets           the tables as Dagster assets, brought up to date by a run
bring_up_to_date            the same without Dagster
read_table, table_files     the tables, as a Spark DataFrame or as the parquet files that make them up
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnirelay_dagster.spark.governance.assets import governance_assets
    from omnirelay_dagster.spark.governance.stored import read_table, table_files
    from omnirelay_dagster.spark.governance.updating import bring_up_to_date

__all__ = ["bring_up_to_date", "governance_assets", "read_table", "table_files"]

_HOMES = {
    "bring_up_to_date": "updating",
    "governance_assets": "assets",
    "read_table": "stored",
    "table_files": "stored",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
