"""Leased Spark work whose step, run worker or whole run is ended by force, on its own session and on Spark Connect.

The Connect server runs on ``local-cluster``, with executors in processes of their own, and serves all of the steps.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omnirelay_dagster.doctor import prepare_environment
from omnirelay_dagster.spark.session import check_connect
from tests.conftest import WITHOUT_COMPILING
from tests.spark.killing import ConnectServer, Fabric
from tests.spark.leasing import until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    check_connect()
    server = ConnectServer(tmp_path_factory.mktemp("connect"))
    yield server
    server.stop()


LOCAL = {
    "spark.master": "local[2]",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    **WITHOUT_COMPILING,
}


ON_CLASSIC, ON_CONNECT = "classic", "connect"
SELDOM = {
    kind: pytest.param(kind, marks=pytest.mark.slow)  # the same is killed in another way, or elsewhere, in every run
    for kind in (ON_CLASSIC, ON_CONNECT)
}


@pytest.fixture
def fabric(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fabric]:
    if request.param == ON_CONNECT:
        server: ConnectServer = request.getfixturevalue("server")
        fabric = Fabric(tmp_path, {"spark.remote": server.url})
    else:
        prepare_environment()
        fabric = Fabric(tmp_path, LOCAL)
    yield fabric
    fabric.close()


@pytest.mark.parametrize("fabric", [SELDOM[ON_CLASSIC], ON_CONNECT], indirect=True)
def test_a_killed_step_publishes_nothing_and_the_next_run_everything(fabric: Fabric) -> None:
    """On Connect its work goes on in the server for a while. Whatever it writes, nobody reads."""
    fabric.hold_back()
    killed = fabric.start()
    fabric.wait_for_tasks()
    os.kill(fabric.step(), signal.SIGKILL)
    assert not fabric.ended_well(killed)
    until(lambda: fabric.queue.sweep().expired == fabric.items)
    assert fabric.published() == []
    fabric.let_go()
    assert fabric.ended_well(fabric.start("work_again")), fabric.log()
    assert fabric.published() == fabric.committed() == fabric.expected()
    assert {status.attempt for status in fabric.queue.inspect(range(1, fabric.items + 1))} == {2}
    applications = re.findall(r"on application (\S+)", fabric.log())
    assert len(applications) >= 2
    if fabric.shares_a_server:  # both steps, in processes of their own, ran on one Spark application
        assert len(set(applications)) == 1


@pytest.mark.parametrize("fabric", [SELDOM[ON_CLASSIC], SELDOM[ON_CONNECT]], indirect=True)
def test_a_step_outlives_its_killed_run_and_publishes_once(fabric: Fabric) -> None:
    fabric.hold_back()
    run = fabric.start()
    fabric.wait_for_tasks()
    step = fabric.step()
    os.kill(run.pid, signal.SIGKILL)
    assert not fabric.ended_well(run)
    assert psutil.pid_exists(step)
    fabric.let_go()
    until(lambda: fabric.queue.stats().completed == fabric.items)
    assert fabric.published() == fabric.committed() == fabric.expected()
    assert fabric.queue.stats().pending == 0


@pytest.mark.parametrize("fabric", [SELDOM[ON_CLASSIC], SELDOM[ON_CONNECT]], indirect=True)
def test_a_terminated_run_stops_its_work_on_the_executors(fabric: Fabric) -> None:
    fabric.hold_back()
    run = fabric.start()
    workers = fabric.wait_for_tasks()
    run.send_signal(signal.SIGTERM)
    until(lambda: fabric.queue.stats().pending == fabric.items)
    until(lambda: not any(psutil.pid_exists(worker) for worker in workers))
    assert not fabric.ended_well(run)
    assert {status.attempt for status in fabric.queue.inspect(range(1, fabric.items + 1))} == {0}
    assert fabric.published() == []
