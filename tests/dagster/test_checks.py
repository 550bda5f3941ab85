"""Asset checks of a queue, evaluated by a real run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster import LeaseQueueResource
from omnirelay_dagster.checks import RULES, build_queue_checks
from omnirelay_dagster.look import queue_asset_key
from omnirelay_dagster.queue_asset import build_queue_asset

ALL = {rule.name for rule in RULES}


@pytest.fixture
def landing(tmp_path: Path) -> LeaseQueueResource:
    return LeaseQueueResource(
        url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", high_watermark=10, durability="relaxed"
    )


@pytest.fixture
def queue(landing: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueueResource(**landing.model_dump(exclude_none=True)).get_queue() as opened:
        yield opened


def files(count: int) -> list[WorkItem]:
    return [WorkItem("file", str(number)) for number in range(count)]


def run_checks(
    instance: dg.DagsterInstance,
    landing: LeaseQueueResource,
    only: str | None = None,
    max_lag: int = 5,
) -> dict[str, dg.AssetCheckEvaluation]:
    key = queue_asset_key("landing")
    selection = dg.AssetSelection.checks(dg.AssetCheckKey(key, only)) if only else dg.AssetSelection.all_asset_checks()
    result = dg.materialize(
        [build_queue_asset("landing"), build_queue_checks("landing", max_lag=max_lag)],
        resources={"landing": landing},
        instance=instance,
        selection=selection,
    )
    assert result.success
    return {each.check_name: each for each in result.get_asset_check_evaluations()}


def failing(evaluations: dict[str, dg.AssetCheckEvaluation]) -> set[str]:
    return {name for name, each in evaluations.items() if not each.passed}


def test_all_pass_on_a_queue_that_is_well(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    queue.enqueue(files(3))
    queue.lease("worker", 1)
    found = run_checks(instance, landing)
    assert set(found) == ALL
    assert failing(found) == set()


def test_one_check_can_be_run_alone(instance: dg.DagsterInstance, landing: LeaseQueueResource) -> None:
    assert set(run_checks(instance, landing, only="dead_letters_empty")) == {"dead_letters_empty"}


def test_everything_that_can_be_wrong_is_told_with_what_to_do(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    queue.enqueue(files(2))
    queue.fail(queue.lease("worker"), "bad", requeue=False)
    queue.lease("gone<b>", 1, duration=0.01)
    queue.enqueue(files(10))
    queue.register_reader("slow", 1)
    time.sleep(0.02)
    found = run_checks(instance, landing)
    assert failing(found) == ALL
    for each in found.values():
        assert each.description is not None
        assert len(each.description) > 40
        assert "gone<" not in each.description
    assert found["dead_letters_empty"].severity == dg.AssetCheckSeverity.ERROR
    assert found["no_expired_leases"].severity == dg.AssetCheckSeverity.WARN
    assert found["no_expired_leases"].metadata["owners"].value == ["gone\\u003cb\\u003e"]
    assert found["replication_lag"].metadata["slowest"].value == "slow"
    assert found["replication_lag"].metadata["lag"].value == queue.stats().head - 1


def test_lag_up_to_the_limit_passes(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    queue.register_reader("slow", 0)
    queue.enqueue(files(5))
    assert failing(run_checks(instance, landing, max_lag=5)) == set()
    assert failing(run_checks(instance, landing, max_lag=4)) == {"replication_lag"}


def test_an_owner_whose_run_is_over_is_not_healthy_however_it_beats(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    def run_with(status: dg.DagsterRunStatus) -> str:
        run = dg.DagsterRun(job_name="some", run_id=str(uuid.uuid4()), status=status)
        return instance.add_run(run).run_id

    queue.enqueue(files(4))
    alive, dead = run_with(dg.DagsterRunStatus.STARTED), run_with(dg.DagsterRunStatus.FAILURE)
    queue.lease(f"dagster/{alive}/bronze", 1)
    queue.lease(f"dagster/{uuid.uuid4()}/of_another_instance", 1)
    assert failing(run_checks(instance, landing)) == set()
    queue.lease(f"dagster/{dead}/bronze", 1)
    found = run_checks(instance, landing)
    assert failing(found) == {"peers_healthy"}
    assert found["peers_healthy"].metadata["run_is_over"].value == [f"dagster/{dead}/bronze"]


def test_an_owner_that_beats_for_something_is_not_silent(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    queue.enqueue(files(2))
    queue.lease("worker", 1, duration=0.01)
    time.sleep(0.02)
    queue.register_reader("reader", queue.stats().head)
    assert failing(run_checks(instance, landing)) == {"no_expired_leases", "peers_healthy"}
    queue.lease("worker", 1)
    assert "peers_healthy" not in failing(run_checks(instance, landing))
