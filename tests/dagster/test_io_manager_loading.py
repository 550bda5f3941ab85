"""The fenced IO manager: what is published is loaded, in the order of the log and as of any number of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from lease_core import LeaseQueue
from lease_core.errors import InvalidInput
from omnirelay_dagster import manifest
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.manifest import READER, NothingPublished
from tests.dagster.publishing import enqueue, output, publish, run, take


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
