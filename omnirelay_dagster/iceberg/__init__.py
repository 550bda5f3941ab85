"""Lakehouse tables: what leases published, in an Apache Iceberg table, every batch once and in the order of the log.

    IcebergTable            a table that is fed from a queue's log, and can be read as of its numbers
    open_catalog            pyiceberg's catalog in SQLite or PostgreSQL
    IcebergCatalogResource  the same as a Dagster resource
    iceberg_table_asset     an asset that brings a table up to date
    build_iceberg_sensor    launches it while published batches wait

Needs the extra ``iceberg``: ``pip install 'omnirelay-dagster[iceberg]'``.
"""

from omnirelay_dagster.iceberg.asset import IcebergCatalogResource, build_iceberg_sensor, iceberg_table_asset
from omnirelay_dagster.iceberg.catalog import open_catalog
from omnirelay_dagster.iceberg.errors import (
    CommitContended,
    FilesWrong,
    IcebergError,
    LogMismatch,
    SchemaDrift,
    SnapshotExpired,
    WatermarkLost,
)
from omnirelay_dagster.iceberg.table import Commit, CommitReport, IcebergTable
from omnirelay_dagster.iceberg.watermark import Mark

__all__ = [
    "Commit",
    "CommitContended",
    "CommitReport",
    "FilesWrong",
    "IcebergCatalogResource",
    "IcebergError",
    "IcebergTable",
    "LogMismatch",
    "Mark",
    "SchemaDrift",
    "SnapshotExpired",
    "WatermarkLost",
    "build_iceberg_sensor",
    "iceberg_table_asset",
    "open_catalog",
]
