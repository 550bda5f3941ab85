"""Items a second through one draining run, against a run for each item with a dynamic partition."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from benchmarks.in_dagster.findings import Draining
from benchmarks.in_dagster.overhead import seconds, work_items
from lease_core import LeaseQueue

ROOT = Path(__file__).parent.parent.parent
LAUNCH_AT_ONCE = {"run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}}
PATIENCE = 600.0
SENSOR_INTERVAL = 1.1  # the sensors' own is one second, and nothing happens before it is over
_ENDED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


class _Site:
    """A queue, a landing folder and the ledger in which both ways say what they have done."""

    def __init__(self, home: Path) -> None:
        from benchmarks.in_dagster import code_location  # reads where its home is when it is imported

        self._numbers = itertools.count()
        self.ledger, self.landing, self.location = home / "ledger.txt", home / "landing", code_location
        self.landing.mkdir(exist_ok=True)
        bench = code_location.bench
        self.queue = LeaseQueue.open(bench.url, bench.namespace, bench.queue_config())

    def fill(self, items: int) -> None:
        for start in range(0, items, 10_000):
            self.queue.enqueue(work_items(f"round-{next(self._numbers)}", min(10_000, items - start)))

    def names(self, count: int) -> list[str]:
        return [f"file-{next(self._numbers):06d}" for _ in range(count)]

    def land(self, count: int) -> None:
        for name in self.names(count):
            (self.landing / name).touch()

    def settle(self, count: int) -> None:
        """Raise unless exactly so many items were worked on since the last time."""
        done = self.ledger.read_text().split()
        self.ledger.unlink()
        if len(done) != count or len(set(done)) != count:
            raise RuntimeError(f"{count} items were to be worked on, and {len(set(done))} of {len(done)} were")


@contextmanager
def _site(scratch: Path) -> Iterator[_Site]:
    home = scratch / "draining"
    home.mkdir(exist_ok=True)
    os.environ["OMNIRELAY_BENCH_HOME"] = str(home)
    site = _Site(home)
    try:
        yield site
    finally:
        site.queue.close()
        del os.environ["OMNIRELAY_BENCH_HOME"]


def launched(items: int, runs: int, rounds: int, scratch: Path, say: Callable[[str], None]) -> Draining:
    """Real runs: the daemon's own code ticks the sensors, and every run has a worker process of its own."""
    from dagster._core.test_utils import create_test_daemon_workspace_context
    from dagster._core.workspace.load_target import ModuleTarget

    target = ModuleTarget("benchmarks.in_dagster.code_location", None, str(ROOT), "bench")
    found = Draining("launched", items, [], runs, [])
    with (
        _site(scratch) as site,
        dg.instance_for_test(overrides=LAUNCH_AT_ONCE) as instance,
        create_test_daemon_workspace_context(target, instance) as workspace,
    ):
        daemon = _Daemon(instance, workspace)
        daemon.tick()
        for _ in range(rounds):
            site.fill(items)
            found.drained.append(daemon.time_runs(1))
            site.settle(items)
            say(f"one launched run drained {items:,} items in {found.drained[-1]:.1f} s")
            site.land(runs)
            found.one_by_one.append(daemon.time_runs(runs))
            site.settle(runs)
            say(f"{runs} launched runs of an item each took {found.one_by_one[-1]:.1f} s")
    return found


class _Daemon:
    """What the daemon does every five seconds, done when it is told to, so that no waiting for it is measured."""

    def __init__(self, instance: dg.DagsterInstance, workspace: Any) -> None:
        self._instance, self._workspace = instance, workspace
        self._due = 0.0

    def tick(self) -> None:
        from dagster._daemon.sensor import execute_sensor_iteration

        for error in execute_sensor_iteration(self._workspace, logging.getLogger("benchmarks"), None, None):
            if error:
                raise RuntimeError(error.to_string())
        self._due = time.monotonic() + SENSOR_INTERVAL

    def time_runs(self, runs: int) -> float:
        """Seconds from the tick that launches them to the end of the last of them."""
        launched, ended = self._count(), self._count(_ENDED)
        time.sleep(max(0.0, self._due - time.monotonic()))
        started = time.perf_counter()
        self.tick()
        if (found := self._count() - launched) != runs:
            raise RuntimeError(f"the tick should have launched {runs} runs, and launched {found}")
        while self._count(_ENDED) < ended + runs:
            if time.perf_counter() - started > PATIENCE:
                raise RuntimeError(f"not all of {runs} runs ended within {PATIENCE:.0f} s")
            time.sleep(0.02)
        return time.perf_counter() - started

    def _count(self, statuses: tuple[dg.DagsterRunStatus, ...] = ()) -> int:
        return self._instance.get_runs_count(dg.RunsFilter(statuses=list(statuses)) if statuses else None)


def in_process(items: int, runs: int, rounds: int, scratch: Path) -> Draining:
    """The kindest way to run an item at a time: no daemon, no launch, no process to start, nothing to import."""
    found = Draining("in process", items, [], runs, [])
    with _site(scratch) as site, dg.instance_for_test() as instance:
        drain = site.location.defs.resolve_job_def("drain")
        run_an_item = site.location.defs.resolve_job_def("run_an_item")

        def one_by_one(names: list[str]) -> None:
            for name in names:
                run_an_item.execute_in_process(instance=instance, partition_key=name)

        for number in range(rounds + 1):
            site.fill(items)
            found.drained.append(seconds(lambda: drain.execute_in_process(instance=instance)))
            site.settle(items)
            names = site.names(runs)
            instance.add_dynamic_partitions("files", names)
            found.one_by_one.append(seconds(lambda: one_by_one(names)))  # noqa: B023
            site.settle(runs)
            if number == 0:  # warms caches and plans
                found.drained.clear()
                found.one_by_one.clear()
    return found
