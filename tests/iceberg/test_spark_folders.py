"""Folders that Spark itself wrote, executors and all: INT96 as it does by default, microseconds, and partitionBy."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import settings
from tests.iceberg import duck
from tests.iceberg.lake import ASSET, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)  # an hour that Berlin does not have
ROWS = [(n, f"naïve 東京 {n}", Decimal(n) / 100, AT if n % 2 else None, "DE" if n % 2 else "FR") for n in range(6)]
COLUMNS = "id long, name string, amount decimal(12, 2), at timestamp, country string"


@pytest.fixture(scope="module")
def spark(local_spark: SparkSession) -> Iterator[SparkSession]:
    with settings(local_spark, {"spark.sql.session.timeZone": "Europe/Berlin"}) as session:
        yield session


def test_what_spark_wrote_is_what_others_read(lake: Lake, spark: SparkSession) -> None:
    frame = spark.createDataFrame(ROWS, COLUMNS).repartition(2)

    def int96(folder: Path) -> None:
        with settings(spark, {"spark.sql.parquet.outputTimestampType": "INT96"}):
            frame.write.parquet(f"file://{folder}")

    def micros(folder: Path) -> None:
        with settings(spark, {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}):
            frame.write.parquet(f"file://{folder}")

    def by_country(folder: Path) -> None:
        frame.write.partitionBy("country").parquet(f"file://{folder}")

    for write in (int96, micros, by_country):
        lake.publish_folder(write, rows=6)
    table = lake.table()
    report = table.commit_published(lake.fenced, ASSET)
    assert (report.batches, report.rows) == (3, 18)
    assert 0 < report.rewritten < report.files
    wanted: list[Any] = sorted(ROWS * 3, key=lambda row: row[0])
    names = ("id", "name", "amount", "at", "country")
    assert duck.rows(table, ", ".join(f'"{name}"' for name in names)) == wanted
    read = table.scan().to_arrow().sort_by("id").to_pylist()
    assert [tuple(row[name] for name in names) for row in read] == wanted
    assert len(table.scan(row_filter="country == 'DE' and at >= '2026-03-29T01:30:00+00:00'").to_arrow()) == 9
