"""The fenced IO manager: partitions are stored apart, and loaded as a reader asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnirelay_dagster import io_manager as module
from omnirelay_dagster import lease_folders
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from tests.dagster.publishing import enqueue, message, run, take

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


def test_draining_partitions(fenced: FencedIOManager) -> None:
    enqueue(fenced.queue, *"abc")

    @leased_asset(queue="landing", io_manager_key="fenced", drain=True, batch_size=2, partitions_def=DAYS)
    def bronze(batch: LeasedBatch) -> list[str]:
        return [item.resource_id for item in batch.items]

    run([bronze], fenced, partition_key="mon")
    assert fenced.load("bronze", dict[str, list]) == {"mon": ["a", "b", "c"]}
