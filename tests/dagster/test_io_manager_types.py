"""The fenced IO manager: what is stored comes back as it was, and types of one's own do too."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import fsspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.type_handlers import TypeHandler
from tests.dagster.publishing import enqueue, publish, run, take

UNICODE = "naïve 東京 🚚 \u0000\u2028"


# Round trips


def pandas_value() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": [1, 2, 3],
            "name": ["a", None, UNICODE],
            "amount": [1.5, float("nan"), -0.0],
            "at": pd.to_datetime(
                ["2026-03-29T00:30Z", None, "1969-12-31T23:59:59.123456Z"], format="ISO8601"
            ).tz_convert("Europe/Berlin"),
            "maybe": pd.array([1, None, 3], dtype="Int64"),
            "flag": pd.array([True, None, False], dtype="boolean"),
            "raw": [b"\x00\xff", None, b""],
            "kind": pd.Categorical(["x", None, "y"]),
            "größe": [[1, 2], None, []],
        }
    )


def arrow_value() -> pa.Table:
    return pa.table(
        {
            "id": pa.array([1, None], pa.int32()),
            "name": ["a", UNICODE],
            "at": pa.array([datetime(2026, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "Asia/Tokyo")),
            "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
            "none": pa.nulls(2),
        }
    )


def polars_value() -> pl.DataFrame:
    return pl.DataFrame(
        {
            "id": [1, None],
            "name": ["a", UNICODE],
            "at": pl.Series([datetime(2026, 1, 1), None]).dt.replace_time_zone("America/New_York"),
            "list": [[1, 2], None],
        }
    )


def json_value() -> list[Any]:
    return [{"id": 1, "name": UNICODE, "none": None, "deep": [[], {}, [1.5, True, 2**60]]}, "text", 7, None]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_freq=False)
        return True
    return bool(one.equals(other)) if isinstance(one, pa.Table | pl.DataFrame) else bool(one == other)


VALUES = {"pandas": pandas_value, "pyarrow": arrow_value, "polars": polars_value, "json": json_value}


@pytest.mark.parametrize("where", ["local", "memory"])
@pytest.mark.parametrize("name", VALUES)
def test_what_a_leased_asset_returns_is_what_its_reader_gets(
    name: str, where: str, tmp_path: Path, landing: LeaseQueueResource
) -> None:
    base = str(tmp_path / "out") if where == "local" else f"memory://{tmp_path.name}-{name}"
    fenced = FencedIOManager(base_path=base, queue=landing)
    enqueue(landing, "a", "b")
    expected = VALUES[name]()

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> Any:
        return expected

    def silver(bronze: Any) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"same": same(expected, bronze), "type": type(bronze).__name__})

    silver.__annotations__["bronze"] = type(expected)
    result = run([bronze, dg.asset(silver)], fenced)

    [event] = result.asset_materializations_for_node("silver")
    assert event.metadata["same"].value is True
    assert event.metadata["type"].value == type(expected).__name__
    [event] = result.asset_materializations_for_node("bronze")
    [published] = fenced.published("bronze")
    assert event.metadata["dagster/uri"].value == published.uri
    assert event.metadata["dagster/row_count"].value == len(expected)
    assert event.metadata["omnirelay/sequence_number"].value == published.sequence_number
    assert event.metadata["omnirelay/bytes"].value == published.bytes > 0
    assert published.path.startswith(f"bronze/_/{event.metadata['omnirelay/lease'].value}-")
    with fsspec.open(published.uri) as stream:  # the address is one that others can open
        assert len(stream.read()) == published.bytes
    assert landing.get_queue().stats().completed == 2


def test_without_an_annotation_a_value_comes_back_as_what_it_was(fenced: FencedIOManager) -> None:
    for name, make in VALUES.items():
        publish(fenced, make(), asset=name)
        assert same(make(), fenced.load(name))


def test_assets_are_named_as_in_the_ui(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "x")
    context = dg.build_output_context(asset_key=dg.AssetKey(["raw", "orders"]), run_id="run")
    published = fenced.publish(context, take(fenced.queue.get_queue()), [1])
    assert published is not None
    assert published.path.startswith("raw/orders/_/")
    assert fenced.load("raw/orders") == fenced.load(["raw", "orders"]) == fenced.load(dg.AssetKey(["raw", "orders"]))


def test_parquet_written_by_one_library_is_loaded_by_another(fenced: FencedIOManager) -> None:
    publish(fenced, pd.DataFrame({"id": [1]}))
    publish(fenced, pa.table({"id": [2]}))
    publish(fenced, pl.DataFrame({"id": [3]}))
    assert fenced.load("bronze", pd.DataFrame)["id"].tolist() == [1, 2, 3]
    assert fenced.load("bronze", pa.Table)["id"].to_pylist() == [1, 2, 3]
    assert fenced.load("bronze", pl.DataFrame)["id"].to_list() == [1, 2, 3]


@pytest.mark.parametrize("kind", [pd.DataFrame, pa.Table, pl.DataFrame])
def test_batches_whose_columns_differ_load_as_one(kind: Any, fenced: FencedIOManager) -> None:
    publish(fenced, pa.table({"id": [1], "name": pa.nulls(1)}))
    publish(fenced, pa.table({"id": [2.5], "name": ["b"], "new": ["c"]}))
    loaded = fenced.load("bronze", kind)
    table = pa.Table.from_pandas(loaded) if kind is pd.DataFrame else pa.table(loaded)
    assert table.to_pydict() == {"id": [1.0, 2.5], "name": [None, "b"], "new": [None, "c"]}


def test_pandas_row_numbers_are_not_data_but_a_named_index_is(fenced: FencedIOManager) -> None:
    frame = pd.DataFrame({"id": [1, 2, 3, 4]})
    publish(fenced, frame)
    publish(fenced, frame[frame.id > 2])
    assert fenced.load("bronze").to_dict("list") == {"id": [1, 2, 3, 4, 3, 4]}
    publish(fenced, frame.assign(day="d").set_index("day"), asset="indexed")
    publish(fenced, frame.assign(day="e").set_index("day"), asset="indexed")
    assert fenced.load("indexed").index.tolist() == ["d"] * 4 + ["e"] * 4


def test_pandas_batches_with_other_dtypes_widen(fenced: FencedIOManager) -> None:
    publish(fenced, pd.DataFrame({"n": pd.array([1, None], dtype="Int64")}))
    publish(fenced, pd.DataFrame({"n": [0.5]}))
    loaded = fenced.load("bronze", pd.DataFrame)["n"]
    assert loaded.dropna().astype(float).tolist() == [1.0, 0.5]


def test_json_lists_are_joined_and_other_values_become_elements(fenced: FencedIOManager) -> None:
    for value in ([1, 2], {"a": 1}, [], "x", [[3]]):
        publish(fenced, value)
    assert fenced.load("bronze", list) == [1, 2, {"a": 1}, "x", [3]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([{"at": datetime(2026, 1, 1)}], r"value\[0\]\['at'\]: JSON has no datetime"),
        ([(1, 2)], r"value\[0\]: JSON has no tuple"),
        ({"a": {1: "x"}}, r"value\['a'\]: the key 1 is not text"),
        ([float("nan")], r"value\[0\]: JSON has no nan; use None"),
    ],
)
def test_what_json_would_change_is_refused(value: Any, words: str, fenced: FencedIOManager) -> None:
    with pytest.raises(TypeError, match=words):
        publish(fenced, value)
    assert fenced.published("bronze") == []


# Types of one's own


class Words:
    def __init__(self, words: list[str]) -> None:
        self.words = words


class WordsHandler(TypeHandler):
    name = "words"
    suffix = ".txt"

    def matches(self, kind: type) -> bool:
        return kind is Words

    def write(self, value: Words, fs: Any, path: str) -> int:
        fs.pipe_file(path, "\n".join(value.words).encode())
        return len(value.words)

    def read(self, fs: Any, paths: Sequence[str]) -> Words:
        return Words([word for path in paths for word in fs.cat_file(path).decode().split("\n")])


class WordsIOManager(FencedIOManager):
    handlers = (WordsHandler(),)


def test_a_type_handler_of_ones_own(tmp_path: Path, landing: LeaseQueueResource, fenced: FencedIOManager) -> None:
    own = WordsIOManager(base_path=fenced.base_path, queue=landing)
    enqueue(landing, "a")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> Words:
        return Words(["one", "two"])

    run([bronze], own)
    publish(own, Words(["three"]))
    assert own.load("bronze", Words).words == ["one", "two", "three"]
    with pytest.raises(dg.DagsterInvariantViolationError, match=r"published as 'words'.*TypeHandler"):
        fenced.load("bronze")


def test_a_type_nobody_handles_is_refused_with_the_remedy(fenced: FencedIOManager) -> None:
    with pytest.raises(
        dg.DagsterInvariantViolationError, match=r"asset bronze: a .*\.Words cannot be stored.*pandas, pyarrow, polars"
    ):
        publish(fenced, Words([]))
    publish(fenced, [1])
    with pytest.raises(dg.DagsterInvariantViolationError, match=r"annotated .*Words.* cannot be loaded"):
        fenced.load("bronze", Words)


def test_an_annotation_that_does_not_fit_what_is_stored_is_refused(fenced: FencedIOManager) -> None:
    publish(fenced, [1])
    with pytest.raises(dg.DagsterInvariantViolationError, match="published as json, which cannot be loaded as pandas"):
        fenced.load("bronze", pd.DataFrame)
    with pytest.raises(dg.DagsterInvariantViolationError, match="come as one list, not as int"):
        fenced.load("bronze", int)
    with pytest.raises(dg.DagsterInvariantViolationError, match="this has no partitions"):
        fenced.load("bronze", dict[str, list])
