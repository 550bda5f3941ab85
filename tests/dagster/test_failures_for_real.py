"""What becomes of the leases when a run is ended by force: real runs, real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem

CODE = Path(__file__).with_name("killable.py")
ITEMS = 5


class Fabric:
    """A queue of five items, and runs of the asset that works on them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "dagster").mkdir()
        (home / "dagster" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        config = QueueConfig(lease_duration=2.0, retry_delay=0)
        self.queue = LeaseQueue.open(f"sqlite:///{home}/fabric.db", "landing", config)
        self.queue.enqueue([WorkItem("file", f"f{n}") for n in range(ITEMS)])
        self.runs: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """A run in processes of its own: the run worker, and a child of it for the step."""
        (self.home / "began").unlink(missing_ok=True)
        environment = {**os.environ, "DAGSTER_HOME": str(self.home / "dagster"), "KILLABLE_HOME": str(self.home)}
        run = subprocess.Popen(
            [sys.executable, "-m", "dagster", "job", "execute", "-f", str(CODE), "-j", "work"],
            env=environment,
            stdout=(self.home / "run.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        self.runs.append(run)
        return run

    def step(self) -> int:
        """The process that runs the body, once it does."""
        until(lambda: (self.home / "began").exists() and (self.home / "began").read_text() != "")
        return int((self.home / "began").read_text())

    def hold_back(self) -> None:
        (self.home / "wait").touch()

    def let_go(self) -> None:
        (self.home / "wait").unlink()

    def finish(self) -> None:
        """A run that is left alone, and completes what is there."""
        (self.home / "wait").unlink(missing_ok=True)
        assert self.start().wait(90) == 0
        stats = self.queue.stats()
        assert (stats.pending, stats.active, stats.completed) == (0, 0, ITEMS)

    def attempts(self) -> set[int]:
        return {status.attempt for status in self.queue.inspect(range(1, ITEMS + 1))}

    def close(self) -> None:
        for run in self.runs:
            for process in (*_children(run.pid), run.pid):
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            run.wait()
        self.queue.close()


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.05)


pytestmark = pytest.mark.slow  # the same endings, under a running instance, are in tests/dagster_dev in every run


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    fabric = Fabric(tmp_path)
    yield fabric
    fabric.close()


def test_a_step_killed_in_its_body_gives_its_work_to_the_next_run(fabric: Fabric) -> None:
    fabric.hold_back()
    run = fabric.start()
    os.kill(fabric.step(), signal.SIGKILL)
    assert run.wait(90) != 0
    assert fabric.queue.stats().active == ITEMS  # nobody was there to hand it back; the leases run out
    until(lambda: fabric.queue.sweep().expired == ITEMS)
    fabric.finish()
    assert fabric.attempts() == {2}


def test_a_whole_run_killed_at_once_gives_its_work_to_the_next_run(fabric: Fabric) -> None:
    fabric.hold_back()
    run = fabric.start()
    fabric.step()
    for process in (*_children(run.pid), run.pid):
        os.kill(process, signal.SIGKILL)
    until(lambda: fabric.queue.sweep().expired == ITEMS)
    fabric.finish()
    assert fabric.attempts() == {2}


def test_a_run_that_is_terminated_hands_its_work_back_at_once(fabric: Fabric) -> None:
    fabric.hold_back()
    run = fabric.start()
    fabric.step()
    run.send_signal(signal.SIGTERM)
    until(lambda: fabric.queue.stats().pending == ITEMS)
    types = [event.type for event in fabric.queue.events()]
    assert (types.count("Released"), types.count("Expired")) == (ITEMS, 0)
    run.wait(90)
    fabric.finish()
    assert fabric.attempts() == {1}


def test_a_step_that_was_paused_past_its_lease_cannot_publish(fabric: Fabric) -> None:
    fabric.hold_back()
    zombie = fabric.start()
    step = fabric.step()
    os.kill(step, signal.SIGSTOP)
    until(lambda: fabric.queue.sweep().expired == ITEMS)
    fabric.finish()
    os.kill(step, signal.SIGCONT)
    assert zombie.wait(90) != 0
    completed = [event for event in fabric.queue.events() if event.type == "Completed"]
    assert len(completed) == ITEMS
    assert {event.token.attempt for event in completed if event.token} == {2}
