"""The demo fabric from end to end, without a UI: the second half of `make demo`.

Order files land in a folder and are enqueued until the queue says that it has enough. A Dagster run turns them into
bronze and is killed with SIGKILL in the middle of a batch; the next run takes over. What silver and the daily revenue
say at the end is compared with what the files themselves add up to.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console
from rich.table import Table

from definitions.fabric import fabric, landing_files
from definitions.orders import write_files
from definitions.tally import Tally, tally
from lease_core import LeaseQueue

HOME = Path(".demo/headless").resolve()
PACE = {"seconds_per_file": 0.05}
PATIENCE = 120.0

console = Console()


class Fabric:
    """The fabric's definitions, to tick its sensor and look at its assets, and runs of it in processes of their own."""

    def __init__(self) -> None:
        shutil.rmtree(HOME, ignore_errors=True)
        (HOME / "dagster").mkdir(parents=True)
        (HOME / "dagster" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        (HOME / "bronze.json").write_text(json.dumps({"ops": {"bronze_orders": {"config": PACE}}}))
        self.defs = fabric(HOME)
        resources = self.defs.resources or {}
        self.queue: LeaseQueue = resources["landing"].get_queue()
        self.sensor_resources = {name: resources[name] for name in ("folder", "landing")}
        self.cursor: str | None = None

    def tick(self) -> str:
        """One tick of the sensor that enqueues files, as Dagster's daemon would do it. Gives what it says."""
        with dg.build_sensor_context(cursor=self.cursor, resources=self.sensor_resources) as context:
            result: Any = landing_files(context)
        self.cursor = result.cursor or self.cursor
        return str(result.skip_reason.skip_message)

    def start(self, job: str, *options: str) -> subprocess.Popen[bytes]:
        """A run, in a process group of its own so that all of it can be killed at once."""
        with (HOME / "runs.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dagster", "job", "execute", "-m", "definitions.fabric", "-j", job, *options],
                env={**os.environ, "DAGSTER_HOME": str(HOME / "dagster"), "FABRIC_HOME": str(HOME)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_bronze(self) -> subprocess.Popen[bytes]:
        return self.start("load_bronze", "-c", str(HOME / "bronze.json"))

    def value(self, asset: str) -> Any:
        logging.disable(logging.INFO)
        with dg.DagsterInstance.from_config(str(HOME / "dagster")) as instance:
            return self.defs.load_asset_value(asset, instance=instance)


def main() -> int:
    arguments = ArgumentParser(
        prog="python -m definitions.fabric_demo", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    arguments.add_argument("--files", type=int, default=120, help="how many files land (default: %(default)s)")
    files = arguments.parse_args().files
    if files < 80:
        arguments.error("--files: 80 or more, or the queue has room for all of them")
    began = time.monotonic()
    there = Fabric()
    write_files(HOME / "landing", files)
    say(f"{files} files landed in {HOME / 'landing'}")
    enqueue_what_fits(there)
    lost = kill_a_run(there)
    work_on_until_done(there, files)
    say("silver_orders and daily_revenue are made from what bronze has published")
    finish(there.start("refine"))
    holds = report(there, lost)
    say(f"that took {time.monotonic() - began:.0f} seconds")
    return 0 if holds else 1


def enqueue_what_fits(there: Fabric) -> None:
    before = -1
    while before != (before := there.queue.stats().pending):
        say(f"landing_files: {there.tick()}")


def kill_a_run(there: Fabric) -> int:
    """Kill a run in the middle of its second batch or a later one. Gives how many leases it held."""
    while True:
        run = there.start_bronze()
        try:
            wait_for(lambda: there.queue.stats().completed > 0 and len(there.queue.leases()) > 0, run)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        stats = there.queue.stats()
        if stats.active:
            say(f"a run was killed with SIGKILL: {stats.completed} files were done, and it held {stats.active} leases")
            return stats.active


def work_on_until_done(there: Fabric, files: int) -> None:
    """Run after run, while the sensor enqueues the rest as there is room for it."""
    deadline = time.monotonic() + PATIENCE
    while (stats := there.queue.stats()).completed + stats.dead < files:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the queue does not get empty: see {HOME / 'runs.log'}")
        say(f"another run works on the queue: {stats.pending} files wait, {stats.active} are leased")
        run = there.start_bronze()
        while run.poll() is None:
            before, said = there.cursor, there.tick()
            if there.cursor != before:
                say(f"landing_files: {said}")
            time.sleep(0.5)
        if run.returncode:  # on a machine that is too busy for heartbeats, leases may be lost: others take over
            say(f"that run failed: see {HOME / 'runs.log'}")
    say(f"the queue is empty: {stats.completed} of {files} files completed, {stats.dead} dead letters")


def finish(run: subprocess.Popen[bytes]) -> None:
    if run.wait(PATIENCE) != 0:
        raise RuntimeError(f"a run failed: see {HOME / 'runs.log'}")


def wait_for(true: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not get to work: see {HOME / 'runs.log'}")
        time.sleep(0.02)


def report(there: Fabric, lost: int) -> bool:
    """Print what happened; whether all of it is exact."""
    expected = tally(HOME / "landing")
    found = what_the_fabric_says(there.queue, there.value)
    log = Counter(event.type for event in events(there.queue))
    dead = Table("dead letter", "reason", title="Files that were refused")
    for item in there.queue.dead_letters():
        dead.add_row(Path(item.item.resource_id).name, (item.last_error or "").splitlines()[0])
    for table in (dead, counts_table(expected, found), days_table(expected, found)):
        console.print()
        console.print(table)
    console.print()
    say(f"leases that expired with the killed run: {log['Expired']} of the {lost} it held")
    say(f"times that backpressure went on or off: {log['BackpressureChanged']}")
    holds = expected == found and log["Expired"] >= lost and log["BackpressureChanged"] >= 2
    if holds:
        console.print("\nEvery order of every good file was counted, and counted once.", style="bold green")
    else:
        console.print("\nThe numbers differ: this is a bug, please report it.", style="bold red")
    return holds


def what_the_fabric_says(queue: LeaseQueue, load: Callable[[str], Any]) -> Tally:
    """The same numbers as the independent tally, from the queue and from the assets as they were stored."""
    stats = queue.stats()
    bronze, silver, revenue = (load(name) for name in ("bronze_orders", "silver_orders", "daily_revenue"))
    return Tally(
        files=stats.completed + stats.dead,
        bad_files=stats.dead,
        records=len(bronze),
        bad_records=int((bronze["problem"] != "").sum()),
        orders=len(silver),
        days={row.day: (int(row.orders), int(row.cents)) for row in revenue.itertuples()},
    )


def events(queue: LeaseQueue) -> list[Any]:
    log: list[Any] = []
    while some := queue.events(after=len(log), limit=10_000):
        log += some
    return log


def counts_table(expected: Tally, found: Tally) -> Table:
    table = _comparison("what", "Counts, by the files themselves and by the fabric")
    for name in ("files", "bad_files", "records", "bad_records", "orders", "cents"):
        _compare(table, name.replace("_", " "), getattr(expected, name), getattr(found, name))
    return table


def days_table(expected: Tally, found: Tally) -> Table:
    table = _comparison("day", "Daily revenue in cents, by the files themselves and by the fabric")
    for day in sorted({*expected.days, *found.days}):
        _compare(table, day, expected.days.get(day, (0, 0))[1], found.days.get(day, (0, 0))[1])
    return table


def _comparison(heading: str, title: str) -> Table:
    table = Table(heading, title=title)
    for column in ("files", "fabric"):
        table.add_column(column, justify="right")
    table.add_column("")
    return table


def _compare(table: Table, name: str, expected: int, found: int) -> None:
    verdict = "[green]ok[/]" if expected == found else "[bold red]DIFFERS[/]"
    table.add_row(name, f"{expected:,}", f"{found:,}", verdict)


def say(text: str) -> None:
    console.print(f"[bold]*[/] {text}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
