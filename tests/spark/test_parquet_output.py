"""Spark DataFrames through the fenced IO manager: what is published comes back, exactly, and nothing else."""

from __future__ import annotations

import datetime as dt
import json
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from lease_core import LeaseQueue
from lease_core.errors import LeaseRefused
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.manifest import NothingPublished
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.spark.schema_drift import SchemaDrift
from tests.spark.leasing import enqueue, output, publish, take

UNICODE = "naïve 東京 🚚 \u2028"
TIMESTAMPS = "spark.sql.parquet.outputTimestampType"


def everything(spark: SparkSession) -> DataFrame:
    """A row of values that tend to get lost, and one of nulls."""
    columns = """id INT, text STRING, amount DECIMAL(38, 18), at TIMESTAMP, local TIMESTAMP_NTZ, day DATE, raw BINARY,
        flag BOOLEAN, ratio DOUBLE, tags ARRAY<STRING>, attributes MAP<STRING, STRING>, deep STRUCT<a: INT, b: STRING>,
        `größe.in cm` INT"""
    full = (
        1,
        UNICODE,
        Decimal("12345678901234567890.123456789012345678"),
        dt.datetime(2026, 3, 29, 0, 59, 59, 123456, tzinfo=dt.UTC),
        dt.datetime(1583, 1, 1, 2, 30),
        dt.date(1969, 12, 31),
        b"\x00\xff",
        False,
        -0.0,
        ["a", None],
        {"k": UNICODE},
        (7, None),
        180,
    )
    return spark.createDataFrame([full, (2, *[None] * 12)], columns)


def rows(frame: DataFrame) -> list[Any]:
    return sorted((tuple(row) for row in frame.collect()), key=str)


def plan(frame: DataFrame) -> str:
    return frame._jdf.queryExecution().executedPlan().toString()


def line(frame: DataFrame, name: str) -> str:
    """One of the things that a plan's scan says of itself."""
    return plan(frame).partition(f"{name}: ")[2].partition(", ReadSchema" if name == "PushedFilters" else "\n")[0]


# Round trips


def test_every_kind_of_value_survives(spark: SparkSession, fenced: FencedIOManager) -> None:
    frame = everything(spark)
    published = publish(fenced, frame)
    loaded = fenced.load("bronze", DataFrame)
    assert rows(loaded) == rows(frame)
    assert loaded.dtypes == frame.dtypes
    assert (published.format, published.rows) == ("spark", 2)
    [file] = [file for file in Path(fenced.base_path).rglob("*.parquet") if file.is_file()][:1]
    assert "INT96" not in str(pq.read_metadata(file).schema)
    assert spark.conf.get(TIMESTAMPS) == "INT96"  # the session's own setting is as it was


def test_without_an_annotation_a_frame_comes_back_as_one(spark: SparkSession, fenced: FencedIOManager) -> None:
    publish(fenced, spark.range(3))
    assert fenced.load("bronze").count() == 3


def test_times_are_the_same_moments_in_another_zone(spark: SparkSession, fenced: FencedIOManager) -> None:
    publish(fenced, everything(spark).select("id", "at", "local"))
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        row = fenced.load("bronze", DataFrame).where("id = 1").selectExpr("CAST(at AS STRING)", "CAST(local AS STRING)")
        assert tuple(row.collect()[0]) == ("2026-03-29 09:59:59.123456", "1583-01-01 02:30:00")
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_a_leased_asset_and_its_reader(spark: SparkSession, fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a", "b", "c")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> DataFrame:
        return batch.to_spark(spark).select("sequence_id", f.upper("resource_id").alias("name"))

    @dg.asset
    def silver(bronze: DataFrame) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"names": sorted(row.name for row in bronze.collect())})

    resources = {"landing": fenced.queue, "fenced": fenced, "io_manager": dg.mem_io_manager}
    result = dg.materialize([bronze, silver], resources=resources, instance=dg.DagsterInstance.ephemeral())
    assert result.asset_materializations_for_node("silver")[0].metadata["names"].value == ["A", "B", "C"]
    [event] = result.asset_materializations_for_node("bronze")
    assert event.metadata["dagster/row_count"].value == 3
    assert event.metadata["omnirelay/bytes"].value > 0


def test_each_library_reads_what_the_others_wrote(spark: SparkSession, fenced: FencedIOManager) -> None:
    at = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    publish(fenced, spark.createDataFrame([(1, "a", at)], "id LONG, name STRING, at TIMESTAMP"))
    stamps = pd.Series([at]).astype("datetime64[us, UTC]")
    publish(fenced, pd.DataFrame({"id": [2], "name": ["b"], "at": stamps}))
    kinds = {"id": pa.array([3], pa.int64()), "name": pa.array(["c"], pa.large_string())}
    publish(fenced, pa.table({**kinds, "at": pa.array([at], pa.timestamp("us", "UTC"))}))
    publish(fenced, pl.DataFrame({"id": [4], "name": ["d"], "at": [at]}))
    expected = [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    loaded = fenced.load("bronze", DataFrame)
    assert rows(loaded.select("id", "name")) == expected
    assert loaded.where(f.col("at") == f.lit(at)).count() == 4
    for kind in (pa.Table, pl.DataFrame, pd.DataFrame):
        value = fenced.load("bronze", kind)
        assert list(zip(list(value["id"]), [str(name) for name in value["name"]], strict=True)) == [
            (pa.scalar(number) if kind is pa.Table else number, name) for number, name in expected
        ]


def test_what_spark_cannot_read_is_named(spark: SparkSession, fenced: FencedIOManager) -> None:
    publish(fenced, pd.DataFrame({"at": pd.to_datetime(["2026-01-01T00:00Z"]).as_unit("ns")}))
    with pytest.raises(TypeError, match=r"the column at of .* is timestamp\[ns.*datetime64\[us, UTC\]"):
        fenced.load("bronze", DataFrame)


def test_a_base_path_with_signs_that_are_patterns_elsewhere(
    spark: SparkSession, tmp_path: Path, landing: LeaseQueueResource
) -> None:
    fenced = FencedIOManager(base_path=str(tmp_path / "env=prod [x] {a,b} %20*"), queue=landing)
    publish(fenced, spark.range(2), asset="a b/ü")
    publish(fenced, spark.range(3), asset="a b/ü")
    assert fenced.load(dg.AssetKey("a b/ü"), DataFrame).columns == ["id"]
    assert fenced.load(dg.AssetKey("a b/ü"), DataFrame).count() == 5


def test_an_address_that_spark_does_not_know(spark: SparkSession, landing: LeaseQueueResource) -> None:
    with pytest.raises(ValueError, match="base_path: Spark cannot reach memory://"):
        publish(FencedIOManager(base_path="memory://x", queue=landing), spark.range(1))


# What is loaded, and what is not


def test_a_number_of_the_log_always_gives_the_same_rows(spark: SparkSession, fenced: FencedIOManager) -> None:
    numbers = [publish(fenced, spark.range(n, n + 1)).sequence_number for n in range(3)]
    later = fenced.load("bronze", DataFrame, as_of=numbers[1])
    publish(fenced, spark.range(9, 10))
    assert rows(later) == [(0,), (1,)]
    assert rows(fenced.load("bronze", DataFrame)) == [(0,), (1,), (2,), (9,)]


def test_only_published_files_are_read(spark: SparkSession, fenced: FencedIOManager) -> None:
    """A zombie's output, and a file that turns up in a published folder, are not there for readers."""
    published = publish(fenced, spark.range(2))
    enqueue(fenced.queue, "x")
    zombie = take(fenced.queue.get_queue())
    with LeaseQueue.open(fenced.queue.url, "landing", clock=lambda: time.time() + 3600) as later:
        assert len(later.lease("successor")) == 1
        with pytest.raises(LeaseRefused):
            fenced.publish(output(), zombie, spark.range(100))
    stray = Path(fenced.base_path, published.path, "part-00009-stray.parquet")
    pq.write_table(pa.table({"id": [77]}), stray)
    assert rows(fenced.load("bronze", DataFrame)) == [(0,), (1,)]
    assert fenced.load("bronze", pa.Table)["id"].to_pylist() == [0, 1]


def test_nothing_published(spark: SparkSession, fenced: FencedIOManager) -> None:
    with pytest.raises(NothingPublished):
        fenced.load("bronze", DataFrame)
    assert fenced.load("bronze", DataFrame, allow_empty=True).collect() == []


def test_an_empty_frame_is_an_output(spark: SparkSession, fenced: FencedIOManager) -> None:
    assert publish(fenced, spark.range(0)).rows == 0
    loaded = fenced.load("bronze", DataFrame)
    assert (loaded.columns, loaded.count()) == (["id"], 0)


def test_an_empty_partitioned_frame_is_an_output(spark: SparkSession, fenced: FencedIOManager) -> None:
    frame = spark.createDataFrame([(1, "x")], "id INT, day STRING")
    assert publish(fenced, frame.where("id > 1"), partition_by="day").rows == 0
    assert fenced.load("bronze", DataFrame).dtypes == [("id", "int"), ("day", "string")]
    assert fenced.load("bronze", DataFrame).count() == 0
    publish(fenced, frame, partition_by="day")
    assert fenced.load("bronze", pa.Table).to_pylist() == [{"id": 1, "day": "x"}]
    assert rows(fenced.load("bronze", DataFrame)) == [(1, "x")]


def test_an_input_gets_its_session_from_the_managers_resource(
    spark: SparkSession, tmp_path: Path, landing: LeaseQueueResource
) -> None:
    asked = []

    class Asked(LazyPySparkResource):
        @property
        def spark_session(self) -> Any:
            asked.append(1)
            return super().spark_session

    pyspark = Asked(spark_config={})
    fenced = FencedIOManager(base_path=str(tmp_path / "out"), queue=landing, spark=pyspark)
    publish(fenced, spark.range(2))

    @dg.asset
    def silver(bronze: DataFrame) -> int:
        return bronze.count()

    bronze = dg.AssetSpec("bronze", metadata={"dagster/io_manager_key": "fenced"})
    resources = {"fenced": fenced, "landing": landing, "pyspark": pyspark, "io_manager": dg.mem_io_manager}
    result = dg.materialize([bronze, silver], resources=resources, instance=dg.DagsterInstance.ephemeral())
    assert result.output_for_node("silver") == 2
    assert asked


def test_vacuum_knows_spark_outputs(spark: SparkSession, fenced: FencedIOManager) -> None:
    frame = spark.createDataFrame([(1, "x")], "id INT, day STRING")
    publish(fenced, frame, partition_by="day")
    enqueue(fenced.queue, "x")
    orphan = take(fenced.queue.get_queue())
    fenced._write(output(partition_by="day"), orphan, frame)
    orphan.release_all()
    assert [removed.lease_id for removed in fenced.vacuum(0)] == [orphan.id]
    assert fenced.load("bronze", DataFrame).count() == 1


# Pruning


def test_columns_and_filters_reach_the_scan(spark: SparkSession, fenced: FencedIOManager) -> None:
    for n in range(3):
        publish(fenced, spark.range(10).selectExpr(f"id + {10 * n} AS id", "'t' AS text", "id * 2 AS twice"))
    some = fenced.load("bronze", DataFrame).where("id > 25").select("id")
    assert plan(some).count("FileScan parquet") == 1  # one scan, however many batches
    assert "ReadSchema: struct<id:bigint>" in plan(some)
    assert "GreaterThan(id,25)" in line(some, "PushedFilters")
    assert rows(some) == [(26,), (27,), (28,), (29,)]


def test_partition_filters_reach_the_scan(spark: SparkSession, fenced: FencedIOManager) -> None:
    """Partitions by column and by Dagster's partition key, and types that a folder's name alone would not tell."""
    columns = "id INT, day DATE, code STRING"
    days = [dt.date(2026, 1, 1), dt.date(2026, 1, 2), None]
    for partition in ("p1", "p2"):
        values = [(n, day, "007") for n, day in enumerate(days)]
        publish(fenced, spark.createDataFrame(values, columns), partition=partition, partition_by=["day", "code"])
    frame = fenced.load("bronze", DataFrame)
    assert frame.dtypes == [("id", "int"), ("day", "date"), ("code", "string")]
    some = frame.where("day = DATE'2026-01-02' AND code = '007'")
    assert "day" in line(some, "PartitionFilters")
    assert rows(some.select("id", "code")) == [(1, "007"), (1, "007")]
    assert len(some.inputFiles()) == 6
    scanned = some.select(f.input_file_name()).distinct().collect()
    assert len(scanned) == 2
    assert all("day=2026-01-02/code=007" in row[0] for row in scanned)
    assert frame.where("day IS NULL").count() == 2
    assert fenced.load("bronze", DataFrame, partitions=["p2"]).count() == 3
    table = fenced.load("bronze", pa.Table, partitions=["p1"])
    assert sorted(table.to_pylist(), key=str) == sorted(
        ({"id": n, "day": day, "code": "007"} for n, day in enumerate(days)), key=str
    )
    assert sorted(fenced.load("bronze", pl.DataFrame)["id"].to_list()) == [0, 0, 1, 1, 2, 2]


def test_partitioned_and_plain_batches_of_one_asset(spark: SparkSession, fenced: FencedIOManager) -> None:
    frame = spark.createDataFrame([(1, "x")], "id INT, day STRING")
    publish(fenced, frame)
    publish(fenced, frame, partition_by="day")
    publish(fenced, pd.DataFrame({"id": pd.array([2], dtype="int32"), "day": ["y"]}))
    assert rows(fenced.load("bronze", DataFrame)) == [(1, "x"), (1, "x"), (2, "y")]


@pytest.mark.parametrize(
    ("columns", "by", "words"),
    [
        ("id INT, day STRING", "dya", "there is no column 'dya', only id, day"),
        ("id INT, at TIMESTAMP", "at", "at is timestamp; partition by text"),
        ("id INT", "id", "names every column"),
        ("id INT, omnirelay_lease STRING", "id", "the column omnirelay_lease has a name"),
    ],
)
def test_partitions_that_cannot_be(
    columns: str, by: str, words: str, spark: SparkSession, fenced: FencedIOManager
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        publish(fenced, spark.createDataFrame([], columns), partition_by=by)


# Drift


def test_other_columns_are_refused_before_anything_is_written(spark: SparkSession, fenced: FencedIOManager) -> None:
    publish(fenced, spark.createDataFrame([(1, "a", 1.5)], "id INT, name STRING, ratio FLOAT"))
    with pytest.raises(SchemaDrift) as refused:
        publish(fenced, spark.createDataFrame([("1", 2.5, "x")], "id STRING, ratio DOUBLE, extra STRING"))
    said = str(refused.value)
    assert "id is string, but int in batch " in said
    assert "name (string in batch " in said
    assert "is missing" in said
    assert "ratio is double, but float in batch " in said
    assert "declare 'widen_types'" in said
    assert "extra (string) is new; to allow it, declare 'add_columns'" in said
    assert len(fenced.published("bronze")) == 1
    assert len(list(Path(fenced.base_path).rglob("_SUCCESS"))) == 1


def test_drift_fails_the_items_with_the_names_of_the_columns(spark: SparkSession, fenced: FencedIOManager) -> None:
    publish(fenced, spark.range(1))
    enqueue(fenced.queue, "y")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> DataFrame:
        return batch.to_spark(spark).select("resource_id")

    resources = {"landing": fenced.queue, "fenced": fenced}
    with pytest.raises(SchemaDrift):
        dg.materialize([bronze], resources=resources, instance=dg.DagsterInstance.ephemeral())
    [status] = fenced.queue.get_queue().inspect([2])
    assert "SchemaDrift: bronze: the columns of this batch differ" in status.errors[0].error


def test_declared_columns_may_be_added(spark: SparkSession, fenced: FencedIOManager) -> None:
    publish(fenced, spark.createDataFrame([(1,)], "id INT"))
    publish(fenced, spark.createDataFrame([(2, "b")], "id INT, name STRING"), schema_evolution=["add_columns"])
    with pytest.raises(SchemaDrift, match=r"name \(string\) is new"):
        fenced.load("bronze", DataFrame)
    assert rows(fenced.load("bronze", DataFrame, schema_evolution=["add_columns"])) == [(1, None), (2, "b")]
    with pytest.raises(SchemaDrift, match=r"name \(string in batch .*\) is missing"):
        publish(fenced, spark.createDataFrame([(3,)], "id INT"), schema_evolution=["add_columns"])


def test_declared_types_may_widen_and_nothing_is_lost(
    spark: SparkSession, tmp_path: Path, landing: LeaseQueueResource
) -> None:
    fenced = FencedIOManager(base_path=str(tmp_path / "out"), queue=landing, schema_evolution=["widen_types"])
    narrow = "a INT, b FLOAT, c DECIMAL(10, 2), d INT, e INT, f DATE, g STRUCT<x: INT>, h TINYINT, i ARRAY<INT>"
    wide = (
        "a BIGINT, b DOUBLE, c DECIMAL(20, 4), d DOUBLE, e DECIMAL(12, 0), f TIMESTAMP_NTZ, g STRUCT<x: BIGINT>, h INT"
    )
    day = dt.date(2026, 1, 2)
    small = (1, 1.5, Decimal("1.25"), 7, 8, day, (9,), 3, [1])
    noon = dt.datetime(2026, 1, 2, 12)
    large = (2**40, 1e300, Decimal("123456789012.1234"), 0.5, Decimal(10**11), noon, (2**40,), 2**30, [2**40])
    publish(fenced, spark.createDataFrame([small], narrow))
    publish(fenced, spark.createDataFrame([large], f"{wide}, i ARRAY<BIGINT>"))
    publish(fenced, spark.createDataFrame([small], narrow))
    loaded = fenced.load("bronze", DataFrame)
    first = (1, 1.5, Decimal("1.2500"), 7.0, Decimal(8), dt.datetime(2026, 1, 2), (9,), 3, [1])
    assert rows(loaded) == sorted([first, first, large], key=str)


@pytest.mark.parametrize(("one", "other"), [("INT", "STRING"), ("BIGINT", "DOUBLE"), ("TIMESTAMP", "TIMESTAMP_NTZ")])
def test_types_that_do_not_hold_each_other_are_refused(
    one: str, other: str, spark: SparkSession, fenced: FencedIOManager
) -> None:
    publish(fenced, spark.createDataFrame([], f"a {one}"))
    with pytest.raises(SchemaDrift, match="a is "):
        publish(fenced, spark.createDataFrame([], f"a {other}"), schema_evolution=["add_columns", "widen_types"])


def test_evolutions_that_do_not_exist(tmp_path: Path, landing: LeaseQueueResource) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="'anything' is none of 'add_columns' and 'widen_types'"):
        FencedIOManager(base_path=str(tmp_path), queue=landing, schema_evolution=["anything"])


def test_the_note_says_what_is_in_the_folder(spark: SparkSession, fenced: FencedIOManager) -> None:
    published = publish(fenced, spark.range(10, numPartitions=2))
    note = json.loads(Path(fenced.base_path, published.path, "_published.json").read_text())
    assert [file["rows"] for file in note["files"]] == [5, 5]
    assert note["schema"]["fields"][0]["name"] == "id"
