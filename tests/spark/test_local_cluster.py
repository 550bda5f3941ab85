"""Leased Spark work on a classic session whose executors are processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omnirelay_dagster.doctor import prepare_environment
from tests.conftest import WITHOUT_COMPILING
from tests.servers.spark_home import spark_home, tidy_home
from tests.spark.killing import Fabric, executors
from tests.spark.leasing import until

pytestmark = pytest.mark.timeout(900)

SPARK = {
    "spark.master": "local-cluster[2,1,1024]",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    **WITHOUT_COMPILING,
}


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    prepare_environment()
    fabric = Fabric(tmp_path, SPARK, SPARK_HOME=str(spark_home()), SPARK_LOCAL_DIRS=str(tmp_path / "local"))
    yield fabric
    fabric.close()
    tidy_home()


def test_a_killed_executor_costs_nothing(fabric: Fabric) -> None:
    fabric.hold_back()
    run = fabric.start("work_and_commit")
    fabric.wait_for_tasks()
    until(lambda: executors(fabric.step()))
    os.kill(executors(fabric.step())[0].pid, signal.SIGKILL)
    fabric.let_go()
    assert fabric.ended_well(run), fabric.log()
    assert fabric.published() == fabric.expected()
    committed = fabric.table().load().current_snapshot()
    assert fabric.committed() == fabric.expected(), "the run has committed what it published"
    assert fabric.table().load().current_snapshot() == committed, "and there was nothing more to commit"
    assert {status.attempt for status in fabric.queue.inspect(range(1, fabric.items + 1))} == {1}
    assert "Spark: " in fabric.log()


@pytest.mark.slow  # a step is killed on Spark Connect in every run, and its executors there are others' too
def test_a_killed_step_takes_its_executors_along(fabric: Fabric) -> None:
    fabric.hold_back()
    killed = fabric.start()
    fabric.wait_for_tasks()
    step = fabric.step()
    until(lambda: len(executors(step)) == 2)
    orphans = executors(step)
    os.kill(step, signal.SIGKILL)
    assert not fabric.ended_well(killed)
    until(lambda: not any(orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE for orphan in orphans))
    until(lambda: fabric.queue.sweep().expired == fabric.items)
    fabric.let_go()
    assert fabric.ended_well(fabric.start()), fabric.log()
    assert fabric.published() == fabric.committed() == fabric.expected()
    assert {status.attempt for status in fabric.queue.inspect(range(1, fabric.items + 1))} == {2}
