"""Batches with other columns than the table: refused by name, or taken as declared. Never silent nulls."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from lease_core.errors import InvalidInput
from omnirelay_dagster.iceberg import SchemaDrift
from tests.iceberg import duck
from tests.iceberg.lake import ASSET, Lake


def column(kind: pa.DataType, value: Any = 1) -> pa.Table:
    return pa.table({"id": pa.array([value], kind)})


WIDER = [
    (pa.int32(), pa.int64(), 2**40),
    (pa.float32(), pa.float64(), 0.1),
    (pa.decimal128(5, 2), pa.decimal128(20, 2), Decimal("123456789.01")),
]


def test_a_new_column_is_refused_and_what_was_before_it_is_committed(lake: Lake) -> None:
    lake.publish(pa.table({"id": [1]}))
    lake.publish(pa.table({"id": [2]}))
    odd = lake.publish(pa.table({"id": [3], "note": ["x"], "extra": [1.0]}))
    lake.publish(pa.table({"id": [4]}))
    table = lake.table()
    with pytest.raises(SchemaDrift, match=r"note is new \(string\); extra is new \(double\)") as refused:
        table.commit_published(lake.fenced, ASSET)
    assert refused.value.columns == ("note", "extra")
    assert f"batch number {odd.sequence_number}" in str(refused.value)
    assert "evolve=['add_columns']" in str(refused.value)
    assert table.scan().to_arrow()["id"].to_pylist() == [1, 2]

    grown = lake.table(evolve=["add_columns", "omit_columns"])
    assert grown.commit_published(lake.fenced, ASSET).batches == 2
    assert duck.rows(grown) == [(1, None, None), (2, None, None), (3, "x", 1.0), (4, None, None)]


def test_a_missing_column_is_refused_unless_declared(lake: Lake) -> None:
    lake.publish(pa.table({"id": [1], "note": ["x"]}))
    lake.publish(pa.table({"id": [2]}))
    with pytest.raises(SchemaDrift, match=r"note is missing \(string\)"):
        lake.table(evolve=["add_columns", "widen_types"]).commit_published(lake.fenced, ASSET)
    table = lake.table(evolve="omit_columns")
    table.commit_published(lake.fenced, ASSET)
    assert duck.rows(table) == [(1, "x"), (2, None)]


@pytest.mark.parametrize(("narrow", "wide", "value"), WIDER, ids=str)
def test_a_wider_type_is_refused_unless_declared(lake: Lake, narrow: Any, wide: Any, value: Any) -> None:
    lake.publish(column(narrow))
    lake.publish(column(wide, value))
    lake.publish(column(narrow))  # narrower than the table by then, and no drift
    with pytest.raises(SchemaDrift, match="id is"):
        lake.table().commit_published(lake.fenced, ASSET)
    table = lake.table(evolve=["widen_types"])
    table.commit_published(lake.fenced, ASSET)
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 1, value] or value == 0.1
    assert {row[0] for row in duck.rows(table)} == {1, value}
    assert len(table.scan(row_filter=f"id >= {value}").to_arrow()) == (3 if value == 0.1 else 1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (pa.table({"id": [1]}), pa.table({"id": ["1"]})),
        (pa.table({"id": ["1"]}), pa.table({"id": [b"1"]})),
        (pa.table({"id": [1.0]}), pa.table({"id": [1]})),
        (pa.table({"id": pa.array([Decimal("1.00")])}), pa.table({"id": pa.array([Decimal("1.000")])})),
        (pa.table({"id": [[1]]}), pa.table({"id": [["1"]]})),
        (pa.table({"id": [{"a": 1}]}), pa.table({"id": [{"a": "1"}]})),
    ],
    ids=["text for number", "bytes for text", "int for double", "scale", "in a list", "in a struct"],
)
def test_another_type_is_refused_whatever_is_declared(lake: Lake, before: pa.Table, after: pa.Table) -> None:
    lake.publish(before)
    lake.publish(after)
    with pytest.raises(SchemaDrift, match=r"id(\.element|\.a)? is .*, in the table") as refused:
        lake.table(evolve=True).commit_published(lake.fenced, ASSET)
    assert "evolve=" not in str(refused.value)
    assert lake.table().scan().to_arrow().num_rows == 1


def test_fields_inside_a_struct_can_be_added(lake: Lake) -> None:
    lake.publish(pa.table({"id": [{"a": 1}]}))
    lake.publish(pa.table({"id": [{"a": 2, "b": "x"}]}))
    with pytest.raises(SchemaDrift, match=r"id\.b is new"):
        lake.table().commit_published(lake.fenced, ASSET)
    table = lake.table(evolve=True)
    table.commit_published(lake.fenced, ASSET)
    assert table.scan().to_arrow()["id"].to_pylist() == [{"a": 2, "b": "x"}, {"a": 1, "b": None}]


def test_a_column_of_nothing_but_nulls_takes_the_type_that_the_table_knows(lake: Lake) -> None:
    lake.publish(pa.table({"id": [1], "note": ["x"]}))
    lake.publish(pa.table({"id": [2], "note": pa.nulls(1)}))
    table = lake.table()
    assert table.commit_published(lake.fenced, ASSET).rewritten == 1
    assert duck.rows(table) == [(1, "x"), (2, None)]


def test_a_column_of_nothing_but_nulls_cannot_make_a_table(lake: Lake) -> None:
    lake.publish(pa.table({"id": [1], "note": pa.nulls(1)}))
    with pytest.raises(SchemaDrift, match="schema=") as refused:
        lake.table().commit_published(lake.fenced, ASSET)
    assert refused.value.columns == ("note",)


def test_a_required_column_has_no_nulls(lake: Lake) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    lake.publish(pa.table({"id": [1]}))
    lake.publish(pa.table({"id": pa.array([None], pa.int64())}))
    table = lake.table(schema=schema)
    with pytest.raises(SchemaDrift, match="'id' is required and has nulls"):
        table.commit_published(lake.fenced, ASSET)
    assert table.scan().to_arrow()["id"].to_pylist() == [1]


@pytest.mark.parametrize("name", ["orders", ".orders", "lake.", ""])
def test_a_table_has_a_namespace_and_a_name(lake: Lake, name: str) -> None:
    from omnirelay_dagster.iceberg import IcebergTable

    with pytest.raises(InvalidInput, match=r"lake\.orders"):
        IcebergTable(name, lake.catalog_url, lake.home)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"evolve": ["everything"]}, "evolve"),
        ({"partition_by": "day(at"}, "partition_by"),
        ({"keep_snapshots": 0}, "keep_snapshots"),
    ],
)
def test_wrong_settings_are_named(lake: Lake, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        lake.table(**options)
