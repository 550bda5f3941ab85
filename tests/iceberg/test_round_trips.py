"""What pandas, Arrow, polars and Spark's folders hold is what pyiceberg, pyarrow and DuckDB read from the table."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnirelay_dagster.iceberg import SchemaDrift
from tests.iceberg import duck
from tests.iceberg.lake import ASSET, Lake, expected, framed, numbered, pairs

UNICODE = "naïve 東京 🚚 \u2028"
BERLIN = timezone(timedelta(hours=1))
WINTER = datetime(2026, 1, 1, 0, 30, tzinfo=BERLIN)

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("rate", pa.float64()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("größe", pa.list_(pa.int64())),
        ("raw", pa.binary()),
        ("flag", pa.bool_()),
        ("inner", pa.struct([("a", pa.int64()), ("b", pa.string())])),
    ]
)
ROWS: list[dict[str, Any]] = [
    {
        "id": 1,
        "name": UNICODE,
        "amount": Decimal("-1234567890.12"),
        "rate": 0.1,
        "at": WINTER,
        "local": datetime(1969, 12, 31, 23, 59, 59, 123456),
        "day": date(2026, 2, 28),
        "größe": [1, 2],
        "raw": b"\x00\xff",
        "flag": True,
        "inner": {"a": 1, "b": "x"},
    },
    dict.fromkeys(SCHEMA.names) | {"id": 2},
]


def as_arrow() -> pa.Table:
    return pa.Table.from_pylist(ROWS, SCHEMA)


def as_arrow_elsewhere() -> pa.Table:
    """Instants noted in another zone, and in other units and ways of storing than Iceberg's."""
    table = as_arrow()
    for name, kind in (
        ("at", pa.timestamp("ns", "Europe/Berlin")),
        ("local", pa.timestamp("ns")),
        ("name", pa.dictionary(pa.int32(), pa.string())),
        ("raw", pa.large_binary()),
    ):
        table = table.set_column(SCHEMA.get_field_index(name), name, table[name].cast(kind))
    return table


def as_pandas() -> pd.DataFrame:
    return as_arrow().to_pandas(timestamp_as_object=False).astype({"id": "Int64", "flag": "boolean"})


def as_polars() -> pl.DataFrame:
    return pl.from_arrow(as_arrow())  # type: ignore[return-value]


@pytest.mark.parametrize("make", [as_arrow, as_arrow_elsewhere, as_pandas, as_polars], ids=lambda make: make.__name__)
def test_values_survive(lake: Lake, make: Any) -> None:
    lake.publish(make())
    table = lake.table(schema=SCHEMA)
    assert table.commit_published(lake.fenced, ASSET).rows == 2

    read = table.scan().to_arrow().select(SCHEMA.names).sort_by("id").to_pylist()
    assert read == ROWS
    found = duck.rows(table, ", ".join(f'"{name}"' for name in SCHEMA.names))
    assert [dict(zip(SCHEMA.names, row, strict=True)) for row in found] == ROWS
    files = [task.file.file_path for task in table.scan().plan_files()]
    plain = [pq.read_table(file.removeprefix("file://"), partitioning=None) for file in files]
    assert sum(each.num_rows for each in plain) == 2
    assert sorted(row["id"] for each in plain for row in each.to_pylist()) == [1, 2]


def test_without_a_schema_the_first_batch_gives_the_columns(lake: Lake) -> None:
    lake.publish(as_arrow_elsewhere())
    lake.publish(as_arrow())
    table = lake.table()
    report = table.commit_published(lake.fenced, ASSET)
    assert (report.files, report.rewritten) == (2, 1)
    kinds = {field.name: str(field.field_type) for field in table.load().schema().fields}  # type: ignore[union-attr]
    assert kinds["at"] == "timestamptz"
    assert kinds["local"] == "timestamp"
    assert kinds["name"] == "string"
    assert [row["at"] for row in table.scan().to_arrow().to_pylist() if row["id"] == 1] == [WINTER, WINTER]


def test_a_file_that_iceberg_takes_is_not_copied(lake: Lake, tmp_path: Path) -> None:
    published = lake.publish(numbered(0))
    table = lake.table()
    assert table.commit_published(lake.fenced, ASSET).rewritten == 0
    [task] = table.scan().plan_files()
    assert task.file.file_path == published.uri
    assert not list((tmp_path / "lake").rglob("*.parquet"))


def test_filters_reach_files_of_both_kinds(lake: Lake) -> None:
    """Bounds that were taken from a footer in another unit would lose rows here."""
    for batch in range(4):
        lake.publish(framed(batch))
    table = lake.table()
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table, row_filter="batch == 2") == [(2, 0), (2, 1), (2, 2)]
    assert len(pairs(table, row_filter="at >= '2026-01-01T01:30:00'")) == 4
    assert len(duck.rows(table, "batch, row", "1, 2")) == 12


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNUSUAL = {
    "uint32": (pa.array([2**32 - 1, None], pa.uint32()), [2**32 - 1, None]),
    "uint64": (pa.array([2**63 - 1, None], pa.uint64()), [2**63 - 1, None]),
    "int8": (pa.array([-128, None], pa.int8()), [-128, None]),
    "half": (pa.array([0.5, None], pa.float16()), [0.5, None]),
    "seconds": (pa.array([5, None], pa.timestamp("s")), [datetime(1970, 1, 1, 0, 0, 5), None]),
    "time": (pa.array([5_000, None], pa.time32("ms")), [time(0, 0, 5), None]),
    "date64": (pa.array([86_400_000, None], pa.date64()), [date(1970, 1, 2), None]),
    "text": (pa.array(["x", None], pa.large_string()), ["x", None]),
    "times": (pa.array([[0], None], pa.list_(pa.timestamp("ns", "Asia/Tokyo"))), [[EPOCH], None]),
}


def test_unusual_types_become_usual_ones_without_loss(lake: Lake) -> None:
    lake.publish(pa.table({name: values for name, (values, _) in UNUSUAL.items()}))
    table = lake.table()
    table.commit_published(lake.fenced, ASSET)
    assert table.scan().to_arrow().to_pydict() == {name: wanted for name, (_, wanted) in UNUSUAL.items()}
    assert duck.rows(table, "uint32, uint64, int8, half", "1 NULLS LAST")[0] == (2**32 - 1, 2**63 - 1, -128, 0.5)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([1], pa.timestamp("ns")), "timestamp"),
        (pa.array([2**64 - 1], pa.uint64()), "int64"),
        (pa.array([1], pa.duration("us")), "duration"),
        (pa.array([Decimal(1)], pa.decimal256(40, 0)), "decimal256"),
    ],
    ids=["a nanosecond", "too large", "duration", "too precise"],
)
def test_what_cannot_be_stored_without_loss_is_refused_by_name(lake: Lake, values: pa.Array, kind: str) -> None:
    lake.publish(pa.table({"good": [1], "odd": values}))
    with pytest.raises(SchemaDrift, match="odd") as refused:
        lake.table().commit_published(lake.fenced, ASSET)
    assert kind in str(refused.value)


def test_a_folder_of_part_files_is_one_batch(lake: Lake) -> None:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        for part in range(3):
            pq.write_table(numbered(0).slice(part, 1), folder / f"part-0000{part}-x.snappy.parquet")
        (folder / "_SUCCESS").touch()
        (folder / ".part-00000-x.snappy.parquet.crc").touch()
        (folder / "_temporary").mkdir()
        pq.write_table(numbered(9), folder / "_temporary" / "part-00009-x.snappy.parquet")

    number = lake.publish_folder(write, rows=3)
    table = lake.table()
    report = table.commit_published(lake.fenced, ASSET)
    assert (report.batches, report.files, report.rows, report.sequence) == (1, 3, 3, number)
    assert pairs(table) == expected(1)


def test_columns_that_only_folder_names_tell(lake: Lake) -> None:
    def write(folder: Path) -> None:
        for name, value in (("DE%2FBY", 1), ("__HIVE_DEFAULT_PARTITION__", 2)):
            (folder / f"region={name}" / "year=2026").mkdir(parents=True)
            pq.write_table(pa.table({"id": [value]}), folder / f"region={name}" / "year=2026" / "part-0.parquet")

    lake.publish_folder(write, rows=2)
    table = lake.table(schema=pa.schema([("id", pa.int64()), ("region", pa.string()), ("year", pa.int32())]))
    table.commit_published(lake.fenced, ASSET)
    assert duck.rows(table, "id, region, year") == [(1, "DE/BY", 2026), (2, None, 2026)]


def test_int96_is_taken_for_the_instants_that_spark_means(lake: Lake) -> None:
    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        table = pa.table({"id": [1], "at": pa.array([WINTER], pa.timestamp("us", "UTC"))})
        pq.write_table(table, folder / "part-0.parquet", use_deprecated_int96_timestamps=True, store_schema=False)

    lake.publish_folder(write)
    table = lake.table()
    assert table.commit_published(lake.fenced, ASSET).rewritten == 1
    assert table.scan().to_arrow().to_pylist() == [{"id": 1, "at": WINTER}]
    assert duck.rows(table) == [(1, WINTER)]


def test_column_ids_of_another_table_are_not_taken_for_ours(lake: Lake) -> None:
    ids = {"batch": b"2", "row": b"1"}  # the other way round
    fields = [pa.field(name, pa.int64(), metadata={b"PARQUET:field_id": number}) for name, number in ids.items()]
    lake.publish(numbered(0))
    lake.publish(numbered(1).cast(pa.schema(fields)))
    table = lake.table()
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(2)
    assert [row[:2] for row in duck.rows(table, "batch, row", "1, 2")] == expected(2)


@pytest.mark.parametrize("by", ["batch", "bucket(4, batch)", "day(at)", "truncate(1, word)"])
def test_a_partitioned_table_gets_files_of_one_partition_each(lake: Lake, by: str) -> None:
    at = pa.array([datetime(2026, 1, day, tzinfo=UTC) for day in (1, 1, 2)], pa.timestamp("us", "UTC"))
    for batch in range(2):
        words = pa.array(["ab", "ac", "b"])
        lake.publish(numbered(batch).append_column("at", at).append_column("word", words))
    table = lake.table(partition_by=by)
    report = table.commit_published(lake.fenced, ASSET)
    assert report.rows == 6
    assert report.rewritten == (0 if by == "batch" else 2)
    assert pairs(table) == expected(2)
    assert pairs(table, row_filter="batch == 1") == [(1, 0), (1, 1), (1, 2)]
    assert sorted(duck.rows(table, "batch, row", "1, 2")) == expected(2)
