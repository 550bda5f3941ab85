"""Run the benchmark: `python -m benchmarks`, or `make bench`."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sqlite3
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import psutil
import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import measure, report, stores
from benchmarks.contenders import MODULES, STORES, load, missing
from benchmarks.results import About, LeaseLatency, Results, Sample, Streaming
from benchmarks.targets import OURS, RAW, check
from tests.servers.postgres import PostgresUnavailable

HERE = Path(__file__).parent
RESULTS = HERE / "results"
CHART = HERE.parent / "docs" / "images" / "bench.svg"


@dataclass(frozen=True)
class Plan:
    cells: tuple[tuple[int, int], ...]  # (batch, workers), in the order of running
    rounds: int
    pace: measure.Pace
    depths: tuple[int, int]
    calls: int  # lease calls timed at each depth


EVERYTHING = tuple((batch, workers) for workers in (1, 4, 8) for batch in (1, 100, 1_000))
FULL = Plan(EVERYTHING, 5, measure.Pace(0.2, 0.4, 0.15), (10_000, 1_000_000), 400)
QUICK = Plan(((1, 1), (100, 1), (100, 8)), 3, measure.Pace(0.1, 0.25, 0.06), (10_000, 100_000), 60)
LIMITS = (1, 100)
PARTS = ("sqlite", "postgres", "latency", "memory", "dagster")
APART = {
    "replication": "benchmarks.replication",
    "hub": "benchmarks.hub",
    "recovery": "benchmarks.recovery",
    "iceberg": "benchmarks.iceberg",
    "spark": "benchmarks.spark_pipeline",
    "spark-log": "benchmarks.spark_log",
}


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 150)
    if options.report:
        _present(Results.read(options.report), console, chart=CHART)
        return 0
    if options.only in APART:
        _apart(options.only, options, console)
        return 0
    plan = QUICK if options.quick else FULL
    results = Results(options.quick, plan.rounds, [list(cell) for cell in plan.cells], list(plan.depths))
    wanted = _wanted(options, results)
    if wanted:
        measure.preload()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory)))
        run = Run(plan, results, console, stack, scratch)
        wanted = run.reachable(wanted)
        run.describe(wanted)
        if options.only in (None, "sqlite", "postgres"):
            run.throughput([name for name in wanted if options.only in (None, STORES[name])])
        if options.only in (None, "latency", "memory"):
            run.depth(wanted, latency=options.only != "memory")
        if options.only in (None, "dagster") and not options.contenders:
            run.dagster(options.quick)
    whole = not (options.quick or options.only or options.contenders)
    kind = "latest" if whole else "quick" if options.quick else "partial"
    if kind == "partial" and not options.contenders:
        _join(results, options.only, console)
    else:
        _present(results, console, chart=CHART if whole else None, path=RESULTS / f"{kind}.json")
    if not (options.only or options.contenders):
        for part in APART:
            _apart(part, options, console)
    return 0


def _apart(part: str, options: argparse.Namespace, console: Console) -> None:
    """A part that measures, shows and writes by itself."""
    module = importlib.import_module(APART[part])
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.directory) as scratch:
        module.run(Path(scratch), options.quick, console, RESULTS)


def _join(results: Results, part: str, console: Console) -> None:
    """Show what was measured, and put it in the place of the same part of the latest results."""
    report.show(results, check(results), console)
    path = RESULTS / "latest.json"
    latest = Results.read(path) if path.exists() else results
    if not latest.same_sizes(results):
        path, latest = RESULTS / "partial.json", results
    elif latest is not results:
        latest.adopt(part, results)
    latest.save(path, [target.row() for target in check(latest)])
    console.print(f"wrote the part {part} of benchmarks/results/{path.name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, some minutes")
    parser.add_argument("--only", choices=(*PARTS, *APART), help="one part of it, which joins the latest results")
    parser.add_argument("--contenders", help=f"a comma-separated choice of: {', '.join(MODULES)}")
    parser.add_argument("--directory", type=Path, help="where the databases go: a disk, not memory (temporary files)")
    parser.add_argument("--report", type=Path, metavar="JSON", help="measure nothing: show and draw this file")
    options = parser.parse_args()
    if unknown := set(_names(options.contenders)) - set(MODULES):
        parser.error(f"no such contender: {', '.join(sorted(unknown))}")
    return options


def _names(chosen: str | None) -> list[str]:
    return [name.strip() for name in chosen.split(",")] if chosen else list(MODULES)


def _wanted(options: argparse.Namespace, results: Results) -> list[str]:
    wanted: list[str] = []
    if options.only == "dagster":
        return wanted
    for name in _names(options.contenders):
        if options.only in ("sqlite", "postgres") and STORES[name] != options.only:
            continue
        if reason := missing(name):
            results.unavailable[name] = reason
        else:
            wanted.append(name)
    return wanted


def _present(results: Results, console: Console, chart: Path | None, path: Path | None = None) -> None:
    targets = check(results)
    report.show(results, targets, console)
    if path:
        results.save(path, [target.row() for target in targets])
        console.print(f"wrote benchmarks/results/{path.name}")
    if chart:
        report.draw(results, chart)
        console.print(f"drew docs/images/{chart.name}")


class Run:
    """One run: opens the stores it needs, walks through the plan and fills the results."""

    def __init__(self, plan: Plan, results: Results, console: Console, stack: ExitStack, scratch: Path) -> None:
        self._plan, self._results, self._console, self._stack, self._scratch = (
            plan,
            results,
            console,
            stack,
            scratch,
        )
        self._stores: dict[str, stores.StoreOfDatabases] = {}

    def reachable(self, wanted: list[str]) -> list[str]:
        """Those whose database can be had here; of the others the tables say why not."""
        if any(STORES[name] == "postgres" for name in wanted):
            try:
                self._store("postgres")
            except (PostgresUnavailable, psycopg.Error, RuntimeError) as error:
                lost = [name for name in wanted if STORES[name] == "postgres"]
                self._results.unavailable |= dict.fromkeys(lost, f"no PostgreSQL: {self._bare(error)}")
                return [name for name in wanted if name not in lost]
        return wanted

    def describe(self, wanted: list[str]) -> None:
        self._results.measured_on = date.today().isoformat()
        self._results.machine = {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30),
            "python": platform.python_version(),
            "fsync_us": round(stores.sync_microseconds(self._scratch)),
            "load_before": round(os.getloadavg()[0], 1),
        }
        if os.getloadavg()[0] > 0.5:
            self._console.print("[yellow]other programs are busy on this machine: expect noise")
        self._results.versions["sqlite"] = sqlite3.sqlite_version
        for name in wanted:
            contender = load(name)
            self._results.contenders.append(
                About(
                    name, contender.store, contender.role, sorted(contender.batched),
                    contender.many_processes, contender.completes, contender.note,
                )
            )  # fmt: skip
            for package in contender.packages:
                self._results.versions[package] = importlib.metadata.version(package)

    def throughput(self, wanted: list[str]) -> None:
        """Round by round, and in a round contender after contender: a ratio is of the same moment."""
        groups = [
            (number, store, batch, workers)
            for number in range(1, self._plan.rounds + 1)
            for store in ("sqlite", "postgres")
            for batch, workers in self._plan.cells
            if any(STORES[name] == store for name in wanted)
        ]
        done: set[tuple[int, str, int, int]] = set()
        with self._progress() as progress:
            task = progress.add_task("throughput", total=len(groups))
            for number, store, batch, workers in groups:
                row = []
                for about in self._results.of(store):
                    cell = (number, about.name, about.measured_at(batch), workers)
                    if about.name not in wanted or cell in done or (workers > 1 and not about.many_processes):
                        continue
                    done.add(cell)
                    progress.update(task, description=f"{about.name}, batch {batch:,}, {workers} workers")
                    sample = self._sample(*cell)
                    self._results.samples.append(sample)
                    row.append(f"{about.name} {sample.failure or format(sample.rates['cycle'], ',.0f')}")
                progress.advance(task)
                where = f"round {number}/{self._plan.rounds}, {store}, batch {batch:,}, {workers} workers"
                self._console.print(f"{where}: {'; '.join(row)}", highlight=False, markup=False)

    def _sample(self, number: int, name: str, batch: int, workers: int) -> Sample:
        contender, store = load(name), self._store(STORES[name])
        target = store.fresh(contender)
        try:
            rates = measure.throughput(name, target, batch, workers, self._plan.pace)
            kept: dict[str, float] = {op: rate for op, rate in rates.items() if op != "complete" or contender.completes}
            return Sample(number, name, batch, workers, kept)
        except measure.WorkerFailed as failure:
            return Sample(number, name, batch, workers, failure=self._bare(failure))
        finally:
            store.discard(target)

    def depth(self, wanted: list[str], latency: bool) -> None:
        """Stream queues full, watching memory; then time leases in the full ones against shallow ones."""
        for store in ("sqlite", "postgres"):
            names = [OURS[store], RAW[store]] if latency else [OURS[store]]
            depths = self._plan.depths if latency else self._plan.depths[1:]
            filled = [(name, depth) for depth in depths for name in names if name in wanted]
            try:
                self._depth(store, filled, LIMITS if latency else ())
            except measure.WorkerFailed as failure:
                self._results.problems.append(f"lease latency and memory on {store}: {self._bare(failure)}")

    def _depth(self, store: str, filled: list[tuple[str, int]], limits: Sequence[int]) -> None:
        targets = [self._fill(name, depth) for name, depth in filled]
        queues = [(name, target) for (name, _), target in zip(filled, targets, strict=True)]
        for limit in limits if queues else ():
            self._console.print(f"timing lease(limit={limit}) on {store}")
            timed = measure.latencies(queues, limit, self._plan.calls, block=20)
            for (name, depth), taken in zip(filled, timed, strict=True):
                row = LeaseLatency(name, store, depth, limit, taken.p50_ms, taken.p99_ms, taken.calls)
                self._results.latency.append(row)
        for target in targets:
            self._store(store).discard(target)

    def dagster(self, quick: bool) -> None:
        """What the plugin costs. Dagster is imported here, so that the other parts do without it."""
        from benchmarks.in_dagster import run

        def say(what: str) -> None:
            self._console.print(what, highlight=False, markup=False)

        scratch = self._scratch / "dagster"
        scratch.mkdir()
        results = self._results
        plan = run.QUICK if quick else run.FULL
        results.dagster = run.measure(plan, results.machine, results.measured_on, scratch, say)

    def _bare(self, failure: Exception) -> str:
        """What went wrong, without the paths of this machine."""
        return str(failure).replace(str(self._scratch), "")

    def _fill(self, name: str, depth: int) -> str:
        target = self._store(STORES[name]).fresh(load(name))
        with self._progress() as progress:
            task = progress.add_task(f"{depth:,} items into {name}", total=depth)
            streamed = measure.stream(name, target, depth, lambda moved: progress.advance(task, moved))
        rate = streamed.items / streamed.seconds
        self._console.print(
            f"{depth:,} items into {name}: {rate:,.0f} items/s, {streamed.growth_mib:.1f} MiB more memory"
        )
        if depth == self._plan.depths[-1]:
            self._results.streaming.append(
                Streaming(name, STORES[name], depth, rate, streamed.growth_mib, streamed.resident_mib)
            )
        return target

    def _store(self, kind: str) -> stores.StoreOfDatabases:
        if kind not in self._stores:
            if kind == "sqlite":
                self._stores[kind] = stores.SqliteFiles(self._scratch)
            else:
                databases = self._stack.enter_context(stores.postgres(self._scratch / "postgres"))
                self._results.versions["postgresql"] = databases.version
                self._stores[kind] = databases
        return self._stores[kind]

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
