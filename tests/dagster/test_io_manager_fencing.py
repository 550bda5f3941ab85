"""The fenced IO manager: who lost the lease publishes nothing, in one batch or many, in ops and in processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pytest

from lease_core.errors import LeaseLost, LeaseRefused
from omnirelay_dagster.asset_decorator import leased_asset, leased_op
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from tests.dagster.publishing import enqueue, message, orphan, output, publish, run, take, taken_over

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
