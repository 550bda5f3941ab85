"""DuckDB with its Iceberg extension from wheels: no network is asked for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import duckdb_extension_avro
import duckdb_extension_iceberg

from omnirelay_dagster.iceberg import IcebergTable


def rows(table: IcebergTable, what: str = "*", order: str = "1") -> list[tuple[Any, ...]]:
    """What DuckDB, which knows nothing of the catalog, reads from the table."""
    with duckdb.connect(config={"allow_unsigned_extensions": "true", "autoinstall_known_extensions": "false"}) as duck:
        for module in (duckdb_extension_avro, duckdb_extension_iceberg):
            [extension] = Path(str(module.__file__)).parent.glob("extensions/*/*.duckdb_extension")
            duck.execute(f"LOAD '{extension}'")
        duck.execute("SET TimeZone = 'UTC'")
        return duck.execute(f"SELECT {what} FROM iceberg_scan('{table.metadata_location}') ORDER BY {order}").fetchall()
