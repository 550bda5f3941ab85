"""The fenced IO manager: what is published is loaded, what is not is never seen, and vacuum knows the difference."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import fsspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import InvalidInput, LeaseLost, LeaseRefused
from omnirelay_dagster import io_manager as module
from omnirelay_dagster import lease_folders, manifest
from omnirelay_dagster.asset_decorator import leased_asset, leased_op
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.manifest import READER, NothingPublished
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.type_handlers import TypeHandler

UNICODE = "naïve 東京 🚚 \u0000\u2028"


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[LeaseQueueResource]:
    resource = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", retry_delay=0.0)
    yield resource
    resource.get_queue().close()


@pytest.fixture
def fenced(tmp_path: Path, landing: LeaseQueueResource) -> FencedIOManager:
    return FencedIOManager(base_path=str(tmp_path / "out"), queue=landing)


def enqueue(landing: LeaseQueueResource, *names: str) -> None:
    landing.get_queue().enqueue([WorkItem("file", name) for name in names])


def take(queue: LeaseQueue, limit: int = 100) -> LeasedBatch:
    return LeasedBatch(queue, queue.lease("worker", limit), lambda text: None)


def output(asset: str = "bronze", partition: str | None = None) -> dg.OutputContext:
    partitions = None if partition is None else dg.StaticPartitionsDefinition([partition])
    key_range = None if partition is None else dg.PartitionKeyRange(partition, partition)
    return dg.build_output_context(
        asset_key=asset, run_id="run", asset_partitions_def=partitions, asset_partition_key_range=key_range
    )


def publish(fenced: FencedIOManager, value: Any, asset: str = "bronze", partition: str | None = None) -> Any:
    """One item comes in, is leased, and its output published."""
    enqueue(fenced.queue, "x")
    return fenced.publish(output(asset, partition), take(fenced.queue.get_queue()), value)


def run(assets: Sequence[Any], fenced: FencedIOManager, **arguments: Any) -> dg.ExecuteInProcessResult:
    resources = {"landing": fenced.queue, "fenced": fenced, "io_manager": dg.mem_io_manager}
    arguments.setdefault("instance", dg.DagsterInstance.ephemeral())
    return dg.materialize(assets, resources=resources, **arguments)


def message(result: dg.ExecuteInProcessResult) -> str:
    """All that Dagster says about why a step failed."""
    assert not result.success
    [failure] = result.get_step_failure_events()
    error = failure.step_failure_data.error
    return f"{error}\n{error.cause}" if error else ""


def taken_over(landing: LeaseQueueResource) -> LeaseQueue:
    """The queue as it is an hour from now, when whatever is leased now has long expired."""
    return LeaseQueue.open(landing.url, "landing", clock=lambda: time.time() + 3600)


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


# Configuration


@pytest.mark.parametrize("queue", [{}, {"queue": None}, {"queue": "landing"}])
def test_without_a_queue_it_is_refused_in_words_that_say_what_to_change(queue: dict[str, Any]) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=r"give it the LeaseQueueResource.*queue=landing\)"):
        FencedIOManager(base_path="out", **queue)


def test_a_blank_base_path_is_refused(landing: LeaseQueueResource) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="name a folder or a URL"):
        FencedIOManager(base_path="", queue=landing)


def test_config_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FABRIC_URL", f"sqlite:///{tmp_path}/fabric.db")
    monkeypatch.setenv("FABRIC_OUT", str(tmp_path / "out"))
    landing = LeaseQueueResource(url=dg.EnvVar("FABRIC_URL"), namespace="landing")
    fenced = FencedIOManager(base_path=dg.EnvVar("FABRIC_OUT"), queue=landing)
    with LeaseQueue.open(f"sqlite:///{tmp_path}/fabric.db", "landing") as queue:
        queue.enqueue(WorkItem("file", "a"))

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> list[str]:
        return [item.resource_id for item in batch.items]

    @dg.asset
    def silver(bronze: list) -> list:
        return bronze

    assert run([bronze, silver], fenced).output_for_node("silver") == ["a"]
    assert len(list((tmp_path / "out" / "bronze" / "_").iterdir())) == 1


def test_the_queue_may_be_configured_when_a_run_is_launched(tmp_path: Path, landing: LeaseQueueResource) -> None:
    enqueue(landing, "a")
    late = LeaseQueueResource.configure_at_launch()
    fenced = FencedIOManager(base_path=str(tmp_path / "out"), queue=late)

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> list[int]:
        return [1]

    config = {"resources": {"landing": {"config": {"url": landing.url, "namespace": "landing"}}}}
    resources = {"landing": late, "fenced": fenced}
    assert dg.materialize(
        [bronze], resources=resources, run_config=config, instance=dg.DagsterInstance.ephemeral()
    ).success
    assert FencedIOManager(base_path=str(tmp_path / "out"), queue=landing).load("bronze") == [1]


def test_an_asset_that_leases_nothing_is_refused(fenced: FencedIOManager) -> None:
    @dg.asset(io_manager_key="fenced")
    def plain() -> int:
        return 1

    text = message(run([plain], fenced, raise_on_error=False))
    assert "asset plain: the fenced IO manager publishes the outputs of leases" in text
    assert "@leased_asset(queue=...)" in text


def test_an_output_under_a_lease_of_another_process_is_refused(fenced: FencedIOManager) -> None:
    @dg.asset(io_manager_key="fenced")
    def forged() -> dg.Output:
        return dg.Output(1, metadata={"omnirelay/lease": "0" * 32})

    assert "is not held by this process" in message(run([forged], fenced, raise_on_error=False))


def test_an_asset_of_another_queue_is_refused(tmp_path: Path, landing: LeaseQueueResource) -> None:
    other = LeaseQueueResource(url=f"sqlite:///{tmp_path}/other.db", namespace="landing")
    fenced = FencedIOManager(base_path=str(tmp_path / "out"), queue=other)
    enqueue(landing, "a")
    with pytest.raises(dg.DagsterInvariantViolationError, match="give both the same LeaseQueueResource"):
        fenced.publish(output(), take(landing.get_queue()), [1])
    assert not (tmp_path / "out").exists()


def test_a_batch_that_is_over_cannot_be_published(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a")
    batch = take(fenced.queue.get_queue())
    batch.complete()
    with pytest.raises(dg.DagsterInvariantViolationError, match=r"the batch was completed.*leave completing"):
        fenced.publish(output(), batch, [1])
    enqueue(fenced.queue, "b")
    batch = take(fenced.queue.get_queue())
    batch.fail(batch.leases[0], "no good")
    with pytest.raises(dg.DagsterInvariantViolationError, match="has no item left"):
        fenced.publish(output(), batch, [1])
    assert fenced.published("bronze") == []


# What is loaded


def test_none_completes_the_batch_and_publishes_nothing(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> None:
        return None

    assert len(run([bronze], fenced).asset_materializations_for_node("bronze")) == 1
    assert fenced.queue.get_queue().stats().completed == 1
    assert fenced.published("bronze") == []


def test_nothing_published_is_an_error_unless_the_reader_says_otherwise(fenced: FencedIOManager) -> None:
    with pytest.raises(NothingPublished, match=r"bronze: nothing is published yet as of number 0 .*Materialize it"):
        fenced.load("bronze", pd.DataFrame)
    assert fenced.load("bronze", pd.DataFrame, allow_empty=True).empty
    assert fenced.load("bronze", pa.Table, allow_empty=True).num_rows == 0
    assert fenced.load("bronze", pl.DataFrame, allow_empty=True).is_empty()
    assert fenced.load("bronze", list, allow_empty=True) == []
    assert fenced.load("bronze", allow_empty=True) is None
    assert fenced.load("bronze", dict[str, list], allow_empty=True) == {}

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> None: ...

    @dg.asset(ins={"bronze": dg.AssetIn(metadata={"omnirelay/allow_empty": True})})
    def silver(bronze: pd.DataFrame) -> int:
        return len(bronze)

    assert run([bronze, silver], fenced, selection=[silver]).output_for_node("silver") == 0


def test_batches_load_in_the_order_of_the_log_whoever_began_first(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a", "b", "c")
    queue = fenced.queue.get_queue()
    batches = [take(queue, 1) for _ in range(3)]
    for index in (2, 0, 1):
        fenced.publish(output(), batches[index], [index])
    assert fenced.load("bronze", list) == [2, 0, 1]


def test_a_batch_that_the_log_has_in_pieces_is_loaded_once(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, *"abcdef")
    batch = take(fenced.queue.get_queue())
    for lease in batch.leases[1::2]:
        batch.fail(lease, "no good")
    published = fenced.publish(output(), batch, ["once"])
    assert len(fenced.queue.get_queue().completions()[0]) == 3
    assert fenced.load("bronze", list) == ["once"]
    assert fenced.published("bronze") == [published]


def test_other_assets_and_other_results_are_not_mixed_in(fenced: FencedIOManager) -> None:
    publish(fenced, ["mine"])
    publish(fenced, ["other"], asset="silver")
    for result in ({"uri": "s3://elsewhere", "asset": "bronze"}, "text", 1, {"kind": "omnirelay.other"}):
        enqueue(fenced.queue, "x")
        take(fenced.queue.get_queue()).complete(result)
    assert fenced.load("bronze", list) == ["mine"]


def test_as_of_a_number_of_the_log(fenced: FencedIOManager) -> None:
    numbers = [publish(fenced, [n]).sequence_number for n in range(3)]
    assert fenced.load("bronze", as_of=numbers[1]) == [0, 1]
    assert fenced.load("bronze", as_of=numbers[1] - 1) == [0]
    assert fenced.load("bronze", as_of=numbers[2]) == fenced.load("bronze") == [0, 1, 2]
    assert FencedIOManager(base_path=fenced.base_path, queue=fenced.queue, as_of=numbers[0]).load("bronze") == [0]
    with pytest.raises(NothingPublished, match=f"as of number {numbers[0] - 1} "):
        fenced.load("bronze", as_of=numbers[0] - 1)
    with pytest.raises(InvalidInput, match=f"as_of: 1000000 is not a number of the log, which ends at {numbers[2]}"):
        fenced.load("bronze", as_of=1_000_000)

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> None: ...

    @dg.asset(ins={"bronze": dg.AssetIn(metadata={"omnirelay/as_of": numbers[1]})})
    def silver(bronze: list) -> list:
        return bronze

    assert run([bronze, silver], fenced, selection=[silver]).output_for_node("silver") == [0, 1]


def test_an_early_number_in_a_fresh_process_reads_no_further_than_it_must(
    fenced: FencedIOManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(fenced, [0]).sequence_number
    publish(fenced, [1])
    monkeypatch.setattr(manifest, "_manifests", {})
    assert fenced.load("bronze", as_of=first) == [0]
    assert fenced.load("bronze") == [0, 1]


def test_a_second_load_reads_only_the_tail_of_the_log(fenced: FencedIOManager, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(8):
        publish(fenced, [n])
    assert len(fenced.load("bronze")) == 8
    head = fenced.queue.get_queue().stats().head
    read = []
    completions = LeaseQueue.completions

    def spy(self: LeaseQueue, after: int = 0, limit: int = 10_000, **more: Any) -> Any:
        read.append(after)
        return completions(self, after, limit, **more)

    publish(fenced, [8])
    monkeypatch.setattr(LeaseQueue, "completions", spy)
    again = FencedIOManager(base_path=fenced.base_path, queue=fenced.queue)
    assert len(again.load("bronze")) == 9
    assert min(read) >= head - 1


def test_a_database_put_back_from_a_backup_is_noticed(tmp_path: Path, fenced: FencedIOManager) -> None:
    publish(fenced, [0])
    fenced.queue.get_queue().close()
    shutil.copy(tmp_path / "fabric.db", tmp_path / "backup.db")
    fenced.queue._queue = None
    publish(fenced, ["lost"])
    assert fenced.load("bronze") == [0, "lost"]
    fenced.queue.get_queue().close()
    for file in tmp_path.glob("fabric.db*"):
        file.unlink()
    shutil.copy(tmp_path / "backup.db", tmp_path / "fabric.db")
    fenced.queue._queue = None
    assert fenced.load("bronze") == [0]
    publish(fenced, [1])
    assert fenced.load("bronze") == [0, 1]


def test_pruning_the_log_leaves_what_is_published_readable(
    fenced: FencedIOManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = fenced.queue.get_queue()
    enqueue(fenced.queue, *"abc")
    take(queue).complete()
    pruned = queue.prune_events(before=queue.stats().head)
    assert pruned > 0
    monkeypatch.setattr(manifest, "_manifests", {})
    publish(fenced, [1])
    queue.prune_events(before=queue.stats().head + 1)
    monkeypatch.setattr(manifest, "_manifests", {})
    assert fenced.load("bronze") == [1]
    assert fenced.vacuum(0) == []
    queue.drop_reader(READER)


def test_a_moved_folder_is_read_from_its_new_place(tmp_path: Path, fenced: FencedIOManager) -> None:
    publish(fenced, [1])
    (tmp_path / "out").rename(tmp_path / "new")
    assert FencedIOManager(base_path=str(tmp_path / "new"), queue=fenced.queue).load("bronze") == [1]
    with pytest.raises(FileNotFoundError) as caught:
        fenced.load("bronze")
    assert "has base_path changed" in caught.value.__notes__[0]


# Partitions

DAYS = dg.StaticPartitionsDefinition(["mon", "tue", "../wed", "_"])


@leased_asset(queue="landing", io_manager_key="fenced", partitions_def=DAYS)
def daily(context: dg.AssetExecutionContext, batch: LeasedBatch) -> pd.DataFrame:
    return pd.DataFrame({"day": context.partition_key, "id": [item.resource_id for item in batch.items]})


def materialize_days(fenced: FencedIOManager, *days: str) -> None:
    for day in days:
        enqueue(fenced.queue, f"{day}-1", f"{day}-2")
        run([daily], fenced, partition_key=day)


def test_partitions_are_stored_and_loaded_apart(fenced: FencedIOManager) -> None:
    materialize_days(fenced, "mon", "../wed", "_")

    @dg.asset(partitions_def=DAYS)
    def one(daily: pd.DataFrame) -> list:
        return daily["id"].tolist()

    for day in ("mon", "../wed", "_"):
        assert run([daily, one], fenced, selection=[one], partition_key=day).output_for_node("one") == [
            f"{day}-1",
            f"{day}-2",
        ]
    folders = sorted(path.name for path in Path(fenced.base_path, "daily").iterdir())
    assert folders == ["%5F", "..%2Fwed", "mon"]
    failed = run([daily, one], fenced, selection=[one], partition_key="tue", raise_on_error=False)
    assert "daily: nothing is published for tue" in message(failed)


def test_many_partitions_come_as_a_dict_or_joined_as_the_annotation_says(fenced: FencedIOManager) -> None:
    materialize_days(fenced, "tue", "mon", "tue")
    lenient = {"daily": dg.AssetIn(metadata={"allow_missing_partitions": True})}

    @dg.asset(ins=lenient)
    def by_day(daily: dict[str, pd.DataFrame]) -> dict:
        return {key: len(frame) for key, frame in daily.items()}

    @dg.asset(ins=lenient)
    def unannotated(daily) -> dict:  # type: ignore[no-untyped-def]
        return {key: len(frame) for key, frame in daily.items()}

    @dg.asset(ins=lenient)
    def joined(daily: pl.DataFrame) -> list:
        return daily["day"].to_list()

    @dg.asset
    def strict(daily: pd.DataFrame) -> None: ...

    readers = [by_day, unannotated, joined]
    result = run([daily, *readers], fenced, selection=readers)
    assert result.output_for_node("by_day") == {"mon": 2, "tue": 4}
    assert result.output_for_node("unannotated") == {"mon": 2, "tue": 4}
    assert result.output_for_node("joined") == ["tue", "tue", "mon", "mon", "tue", "tue"]
    assert "nothing is published for ../wed, _" in message(
        run([daily, strict], fenced, selection=[strict], raise_on_error=False)
    )
    assert fenced.load("daily", dict[str, pa.Table]).keys() == {"mon", "tue"}
    assert len(fenced.load("daily", pd.DataFrame, partitions=["mon"])) == 2
    assert len(fenced.load("daily", pd.DataFrame)) == 6


def test_multi_dimensional_partitions(fenced: FencedIOManager) -> None:
    both = dg.MultiPartitionsDefinition({"day": DAYS, "shard": dg.StaticPartitionsDefinition(["0", "1"])})

    @leased_asset(queue="landing", io_manager_key="fenced", partitions_def=both)
    def sharded(context: dg.AssetExecutionContext, batch: LeasedBatch) -> list[str]:
        return [str(context.partition_key)]

    @dg.asset(partitions_def=both)
    def reader(sharded: list) -> list:
        return sharded

    for shard in ("0", "1"):
        enqueue(fenced.queue, shard)
        run([sharded], fenced, partition_key=dg.MultiPartitionKey({"day": "mon", "shard": shard}))
    key = dg.MultiPartitionKey({"day": "mon", "shard": "1"})
    result = run([sharded, reader], fenced, selection=[reader], partition_key=key)
    assert result.output_for_node("reader") == ["mon|1"]


def test_one_run_for_many_partitions_is_refused(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a")
    context = dg.build_output_context(
        asset_key="daily",
        run_id="run",
        asset_partitions_def=DAYS,
        asset_partition_key_range=dg.PartitionKeyRange("mon", "tue"),
    )
    with pytest.raises(dg.DagsterInvariantViolationError, match=r"an output is of one partition.*for 2"):
        fenced.publish(context, take(fenced.queue.get_queue()), [1])


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.none() | st.text())
def test_whatever_a_key_says_its_folder_is_below_the_base(parts: list[str], partition: str | None) -> None:
    folder = module.folder_of(parts, partition, f"{'0' * 32}-1")
    pieces = folder.split("/")
    assert len(pieces) == len(parts) + 2
    assert all(piece not in ("", ".", "..") and len(piece) <= 120 and piece.isascii() for piece in pieces)
    assert not any(lease_folders._LEASE_FOLDER.fullmatch(piece) for piece in pieces[:-1])
    assert (pieces[-2] == "_") == (partition is None)
    assert os.path.normpath(f"/base/{folder}") == f"/base/{folder}"


# Draining, and ops


def test_draining_publishes_batch_after_batch(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, *"abcdefg")

    @leased_asset(queue="landing", io_manager_key="fenced", drain=True, batch_size=3)
    def bronze(batch: LeasedBatch) -> Any:
        names = [item.resource_id for item in batch.items]
        return dg.Output(names) if "a" in names else names

    @dg.asset
    def silver(bronze: list) -> list:
        return bronze

    result = run([bronze, silver], fenced)
    assert result.output_for_node("silver") == list("abcdefg")
    assert [each.rows for each in fenced.published("bronze")] == [3, 3, 1]
    assert len(result.asset_materializations_for_node("bronze")) == 1
    assert fenced.queue.get_queue().stats().completed == 7


def test_draining_partitions(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, *"abc")

    @leased_asset(queue="landing", io_manager_key="fenced", drain=True, batch_size=2, partitions_def=DAYS)
    def bronze(batch: LeasedBatch) -> list[str]:
        return [item.resource_id for item in batch.items]

    run([bronze], fenced, partition_key="mon")
    assert fenced.load("bronze", dict[str, list]) == {"mon": ["a", "b", "c"]}


@pytest.mark.parametrize("drain", [False, True])
def test_ops_hand_their_outputs_on_within_the_run(drain: bool, fenced: FencedIOManager) -> None:
    @leased_op(queue="landing", drain=drain, batch_size=2, out=dg.Out(is_required=False, io_manager_key="fenced"))
    def pull(batch: LeasedBatch) -> Any:
        return [item.resource_id for item in batch.items]

    seen: list[Any] = []

    @dg.op
    def push(names: list) -> None:
        seen.append(names)

    @dg.job(resource_defs={"landing": fenced.queue, "fenced": fenced})
    def relay() -> None:
        push(pull())

    for names in ("ab", "cd"):
        enqueue(fenced.queue, *names)
        assert relay.execute_in_process().success
    assert seen == [["a", "b"], ["c", "d"]]


# Fencing


def test_a_zombies_output_is_never_seen(tmp_path: Path, landing: LeaseQueueResource, fenced: FencedIOManager) -> None:
    """Two runs work on the same item: the first one's lease expires unnoticed, the second takes it over and wins."""
    enqueue(landing, "a")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> list[str]:
        with taken_over(landing) as later:
            winner = take(later)
            assert [lease.item for lease in winner.leases] == batch.items
            fenced.queue._queue, mine = later, fenced.queue.get_queue()
            fenced.publish(output(), winner, ["winner"])
            fenced.queue._queue = mine
        return ["zombie"]

    @dg.asset
    def silver(bronze: list) -> list:
        return bronze

    with dg.instance_for_test() as instance:
        result = run([bronze], fenced, instance=instance, raise_on_error=False)
        text = message(result)
        assert "LeaseRefused" in text
        assert result.asset_materializations_for_node("bronze") == []
        assert instance.get_latest_materialization_event(dg.AssetKey("bronze")) is None
        assert run([bronze, silver], fenced, instance=instance, selection=[silver]).output_for_node("silver") == [
            "winner"
        ]

    files = sorted(Path(fenced.base_path).rglob("*.json"))
    assert sorted(file.read_text() for file in files) == ['["winner"]', '["zombie"]']
    [removed] = fenced.vacuum(0)
    assert removed.bytes == len('["zombie"]')
    [left] = Path(fenced.base_path).rglob("*.json")
    assert left.read_text() == '["winner"]'
    assert fenced.load("bronze") == ["winner"]
    assert fenced.vacuum(0) == []


def test_one_lost_lease_of_many_refuses_the_whole_output(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a", "b", "c")
    batch = take(fenced.queue.get_queue())
    fenced.queue.get_queue().fail(batch.leases[1].token, "by somebody else")
    with pytest.raises(LeaseRefused) as refused:
        fenced.publish(output(), batch, [1])
    assert "vacuum removes it" in refused.value.__notes__[0]
    assert fenced.published("bronze") == []
    assert fenced.queue.get_queue().stats().completed == 0


def test_a_lease_known_to_be_lost_writes_nothing(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a")
    batch = take(fenced.queue.get_queue())
    with batch:
        batch._hold._give_up([batch.leases[0].token])
        with pytest.raises(LeaseLost):
            fenced.publish(output(), batch, [1])
    assert not Path(fenced.base_path).exists()


def test_a_failing_filesystem_fails_the_items_with_its_error(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a")
    Path(fenced.base_path).write_text("a file, where a folder should be")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> list[int]:
        return [1]

    result = run([bronze], fenced, raise_on_error=False)
    assert not result.success
    assert result.asset_materializations_for_node("bronze") == []
    [status] = fenced.queue.get_queue().inspect(1)
    assert (status.state, status.attempt) == ("pending", 1)
    assert status.errors[0].error.startswith(("FileExistsError", "NotADirectoryError"))


def test_after_a_refused_output_the_good_part_of_the_batch_is_handed_back(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, "a", "b")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> list[int]:
        fenced.queue.get_queue().fail(batch.leases[0].token, "by somebody else")
        return [1]

    assert "LeaseRefused" in message(run([bronze], fenced, raise_on_error=False))
    failed, released = fenced.queue.get_queue().inspect([1, 2])
    assert (failed.state, failed.attempt) == ("pending", 1)
    assert (released.state, released.errors) == ("pending", ())


def fabric_job() -> dg.JobDefinition:
    """A job that other processes can build again, from nothing but the environment."""
    root = os.environ["OMNIRELAY_TEST_FABRIC"]
    landing = LeaseQueueResource(url=f"sqlite:///{root}/fabric.db", namespace="landing")
    resources = {"landing": landing, "fenced": FencedIOManager(base_path=f"{root}/out", queue=landing)}

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> pd.DataFrame:
        return batch.to_pandas()[["resource_id"]]

    @dg.asset
    def silver(bronze: pl.DataFrame) -> dg.MaterializeResult:
        return dg.MaterializeResult(metadata={"ids": bronze["resource_id"].to_list()})

    job = dg.define_asset_job("fabric", executor_def=dg.multiprocess_executor)
    return dg.Definitions(assets=[bronze, silver], jobs=[job], resources=resources).resolve_job_def("fabric")


def test_steps_in_processes_of_their_own(
    tmp_path: Path, fenced: FencedIOManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIRELAY_TEST_FABRIC", str(tmp_path))
    enqueue(fenced.queue, "a", "b")
    with dg.instance_for_test() as instance:
        with dg.execute_job(dg.reconstructable(fabric_job), instance=instance) as result:
            assert result.success
        event = instance.get_latest_materialization_event(dg.AssetKey("silver"))
        assert event is not None
        assert event.asset_materialization is not None
        assert event.asset_materialization.metadata["ids"].value == ["a", "b"]
    assert fenced.load("bronze")["resource_id"].tolist() == ["a", "b"]


def test_the_same_on_postgresql(tmp_path: Path, postgres_url: str) -> None:
    landing = LeaseQueueResource(url=postgres_url, namespace="landing", auto_migrate=True)
    fenced = FencedIOManager(base_path=str(tmp_path / "out"), queue=landing)
    first = publish(fenced, [1])
    zombie = orphan(fenced)
    landing.get_queue().fail(zombie.leases[0].token, "taken away", delay=0)
    with pytest.raises(LeaseRefused):
        fenced.publish(output(), zombie, ["zombie"])
    fenced.publish(output(), take(landing.get_queue()), [2])
    assert [removed.lease_id for removed in fenced.vacuum(0)] == [zombie.id]
    assert fenced.load("bronze") == [1, 2]
    assert fenced.load("bronze", as_of=first.sequence_number) == [1]
    landing.get_queue().close()


# Vacuum


def orphan(fenced: FencedIOManager, value: Any = "orphan") -> LeasedBatch:
    """Written under a lease, and never published; the lease is still held."""
    enqueue(fenced.queue, "x")
    batch = take(fenced.queue.get_queue())
    fenced._write(output(), batch, value)
    return batch


@pytest.mark.parametrize("where", ["local", "memory"])
def test_vacuum_removes_what_was_never_published(where: str, tmp_path: Path, landing: LeaseQueueResource) -> None:
    base = str(tmp_path / "out") if where == "local" else f"memory://vacuum-{tmp_path.name}"
    fenced = FencedIOManager(base_path=base, queue=landing)
    publish(fenced, ["kept"])
    batch = orphan(fenced)
    assert fenced.vacuum(0) == []  # its lease is still held
    batch.release_all()
    assert fenced.vacuum() == []  # not old enough
    would = fenced.vacuum(0, dry_run=True)
    assert [each.lease_id for each in would] == [batch.id]
    fs, path = fsspec.core.url_to_fs(would[0].uri)
    assert fs.find(path)
    assert fenced.vacuum(0) == would
    assert not fs.exists(path)
    assert fenced.vacuum(0) == []
    assert fenced.load("bronze") == ["kept"]


def test_vacuum_touches_nothing_that_it_cannot_prove_to_be_its_own(
    tmp_path: Path, landing: LeaseQueueResource, fenced: FencedIOManager
) -> None:
    """Other people's files, other queues' outputs in the same folder, and leases this log does not know."""
    other_queue = LeaseQueueResource(url=f"sqlite:///{tmp_path}/other.db", namespace="other")
    other = FencedIOManager(base_path=fenced.base_path, queue=other_queue)
    publish(other, ["other"])
    batch = orphan(fenced)
    batch.release_all()
    base = Path(fenced.base_path)
    strange = [
        base / "notes.txt",
        base / "bronze" / "_" / "notes.txt",
        base / "bronze" / "_" / f"{'0' * 32}-1" / "part-0.json",
        base / "bronze" / "_" / f"{batch.id}-999999" / "part-0.json",
        base / "bronze" / "_" / f"{batch.id}-{batch.leases[0].token.fence}.bak" / "part-0.json",
        base / f"{batch.id}-{batch.leases[0].token.fence}" / "part-0.json",
        tmp_path / "outside" / "_" / f"{batch.id}-{batch.leases[0].token.fence}" / "part-0.json",
    ]
    for file in strange:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    assert [removed.lease_id for removed in fenced.vacuum(0)] == [batch.id]
    assert all(file.read_text() == "mine" for file in strange)
    assert other.load("bronze") == ["other"]
    assert other.vacuum(0) == []


def test_vacuum_of_a_folder_that_is_not_there(fenced: FencedIOManager) -> None:
    assert fenced.vacuum(0) == []


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "write", "publish", "fail", "expire", "vacuum"]), st.integers(0, 5)),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_vacuum_never_removes_what_is_published_or_may_still_be(actions: list[tuple[str, int]]) -> None:
    """Workers take, write, publish, fail and lose their leases in any order, while vacuum runs in between."""
    now = time.time() - 1_000_000
    with (
        tempfile.TemporaryDirectory() as base,
        LeaseQueue.open("sqlite://", "landing", QueueConfig(retry_delay=0), clock=lambda: now) as queue,
    ):
        fenced = FencedIOManager(base_path=base, queue=LeaseQueueResource(url="sqlite://"))
        fenced.queue._queue = queue
        queue.enqueue([WorkItem("file", str(n)) for n in range(12)])
        batches: list[LeasedBatch] = []
        written: dict[str, str] = {}
        for action, which in actions:
            now += 1
            batch = batches[which % len(batches)] if batches else None
            if action == "expire":
                now += 60
            elif action == "vacuum":
                fenced.vacuum(0)
            elif action == "take" and len(batches) < 20:
                batches.extend(each for each in [take(queue, 1 + which)] if each.leases)
            elif batch is not None and batch.remaining:
                act(fenced, batch, action, written)
            assert_nothing_is_missing(fenced, queue, written)
        now += 60
        queue.sweep()
        fenced.vacuum(0)
        left = {str(path.relative_to(base)) for path in Path(base).rglob("*.json")}
        assert left == {each.path for each in fenced.published("bronze")}


def act(fenced: FencedIOManager, batch: LeasedBatch, action: str, written: dict[str, str]) -> None:
    if action == "write":
        written[batch.id] = fenced._write(output(), batch, [batch.id]).path
    elif action == "fail":
        batch.fail_all("no good")
    elif action == "publish":
        try:
            written[batch.id] = fenced.publish(output(), batch, [batch.id]).path  # type: ignore[union-attr]
        except LeaseRefused:
            written.pop(batch.id, None)


def assert_nothing_is_missing(fenced: FencedIOManager, queue: LeaseQueue, written: dict[str, str]) -> None:
    published = fenced.published("bronze")
    assert fenced.load("bronze", list, allow_empty=True) == [each.lease_id for each in published]
    held = {lease.token.lease_id for lease in queue.leases()}
    assert all(Path(fenced.base_path, path).exists() for lease_id, path in written.items() if lease_id in held)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", ["lease_folders", "leases_held", "manifest_of"])
def test_whatever_happens_between_the_steps_of_a_vacuum_survives(
    step: str, before: bool, fenced: FencedIOManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before or after each of the three looks, one writer publishes and another one begins to write."""
    first, begun = orphan(fenced, ["first"]), []
    original = getattr(module, step)

    def meanwhile() -> None:
        monkeypatch.setattr(module, step, original)
        fenced.publish(output(), first, ["first"])
        begun.append(orphan(fenced, ["second"]))

    def disturbed(*given: Any) -> Any:
        if before:
            meanwhile()
            return original(*given)
        seen = original(*given)
        meanwhile()
        return seen

    monkeypatch.setattr(module, step, disturbed)
    assert fenced.vacuum(0) == []
    fenced.publish(output(), begun[0], ["second"])
    assert fenced.load("bronze") == ["first", "second"]
