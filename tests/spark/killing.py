"""Runs of the fabric in processes of their own, to be killed, and the rows that are published afterwards."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from lease_core import LeaseQueue, QueueConfig, WorkItem
from omnirelay_dagster.doctor import prepare_environment
from omnirelay_dagster.iceberg import IcebergTable
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from tests.conftest import WITHOUT_COMPILING
from tests.servers.spark_home import spark_home, tidy_home
from tests.spark.fabric import ROWS
from tests.spark.leasing import until

CODE = Path(__file__).with_name("fabric.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def executors(pid: int) -> list[psutil.Process]:
    """The executor processes below a process."""
    found = []
    for process in descendants(pid):
        try:
            if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


class ConnectServer:
    """A Spark Connect server from the wheel, on a master with executors in processes of their own."""

    def __init__(self, folder: Path) -> None:
        prepare_environment()
        self.port = free_port()
        self.url = f"sc://127.0.0.1:{self.port}"
        settings = {
            "spark.master": "local-cluster[2,1,1024]",
            "spark.executor.memory": "512m",
            "spark.ui.enabled": "false",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(folder / "local"),
            **WITHOUT_COMPILING,
        }
        home = spark_home()
        command = [str(home / "bin" / "spark-submit"), "--driver-memory", "512m"]
        for key, value in settings.items():
            command += ["--conf", f"{key}={value}"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
        self.log = folder / "server.log"
        environ = {**os.environ, "SPARK_HOME": str(home)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            until(self._listens, 500)
        except BaseException:
            self.stop()
            raise

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        end([self.process.pid, *(process.pid for process in descendants(self.process.pid))])
        self.process.wait()
        tidy_home()


def end(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _sorted(rows: pa.Table) -> list[tuple[int, int]]:
    return sorted((row["sequence_id"], row["n"]) for row in rows.to_pylist())


class Fabric:
    """A queue, and runs of the asset that works on it."""

    def __init__(self, home: Path, spark: dict[str, Any], items: int = 10, **environ: str) -> None:
        self.home, self.items = home, items
        self.shares_a_server = "spark.remote" in spark
        for folder in ("dagster", "tasks"):
            (home / folder).mkdir()
        (home / "dagster" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        config = QueueConfig(lease_duration=10.0, retry_delay=0)
        self.queue = LeaseQueue.open(f"sqlite:///{home}/fabric.db", "landing", config)
        self.queue.enqueue([WorkItem("file", f"f{n}") for n in range(items)])
        self.environ = {"FABRIC_HOME": str(home), "FABRIC_SPARK": json.dumps(spark), **environ}
        self.environ["DAGSTER_HOME"] = str(home / "dagster")
        self._runs: list[subprocess.Popen[bytes]] = []

    def start(self, job: str = "work") -> subprocess.Popen[bytes]:
        """A run: the run worker and, for the job ``work``, a child of it for the step."""
        command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(CODE), "-j", job]
        with (self.home / "run.log").open("ab") as log:
            environ = {**os.environ, **self.environ}
            self._runs.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
        return self._runs[-1]

    def hold_back(self) -> None:
        (self.home / "wait").touch()

    def let_go(self) -> None:
        (self.home / "wait").unlink()

    def wait_for_tasks(self, more_than: int = 0) -> list[int]:
        """The Python workers of Spark that are at work for us, once there are some."""
        until(lambda: len(list((self.home / "tasks").iterdir())) > more_than, 500)
        return [int(path.name.partition("-")[0]) for path in (self.home / "tasks").iterdir()]

    def step(self) -> int:
        return int((self.home / "body").read_text())

    def log(self) -> str:
        return (self.home / "run.log").read_text()

    def ended_well(self, run: subprocess.Popen[bytes]) -> bool:
        return run.wait(500) == 0

    def published(self) -> list[tuple[int, int]]:
        """The rows that anybody would load, in order."""
        with self._fenced() as fenced:
            return _sorted(fenced.load("bronze", pa.Table, allow_empty=True))

    def committed(self) -> list[tuple[int, int]]:
        """The rows of the Iceberg table once all that is published is in it, in order."""
        with self._fenced() as fenced:
            table = self.table()
            table.commit_published(fenced, "bronze")
            return _sorted(table.scan().to_arrow())

    def table(self) -> IcebergTable:
        return IcebergTable("lake.bronze", f"sqlite:///{self.home}/catalog.db", self.home / "lake")

    @contextmanager
    def _fenced(self) -> Iterator[FencedIOManager]:
        landing = LeaseQueueResource(url=f"sqlite:///{self.home}/fabric.db", namespace="landing")
        yield FencedIOManager(base_path=f"{self.home}/out", queue=landing)
        landing.get_queue().close()

    def expected(self) -> list[tuple[int, int]]:
        return [(item, n) for item in range(1, self.items + 1) for n in range(1, ROWS + 1)]

    def close(self) -> None:
        for run in self._runs:
            end([run.pid, *(process.pid for process in descendants(run.pid))])
            run.wait()
        if (self.home / "body").exists():
            step = self.step()
            end([step, *(process.pid for process in descendants(step))])
        self.queue.close()
