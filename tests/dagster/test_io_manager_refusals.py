"""The fenced IO manager: where its settings come from, and what it will not publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from tests.dagster.publishing import enqueue, message, output, run, take


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
