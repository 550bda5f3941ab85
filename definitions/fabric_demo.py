"""The demo fabric from end to end, without a UI: the second half of `make demo`.

Order files land in a folder and are enqueued until the queue says that it has enough. A Dagster run turns them into
bronze on Spark and is killed with SIGKILL in the middle of a batch; the next run takes over. Silver and gold are made
from what bronze published, and committed to Iceberg tables. What all of them say at the end is compared with what a
single pass over the files themselves comes to.
"""

from __future__ import annotations

import io
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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
from rich.console import Console
from rich.table import Table

from definitions.bronze import MOST_BYTES
from definitions.by_hand import FabricByHand
from definitions.findings import by_assets, by_iceberg, revenue_of_versions
from definitions.orders import write_files
from definitions.tally import Tally, tally
from lease_core import LeaseEvent, LeaseQueue
from omnirelay_dagster.spark.governance import table_files

HOME = Path(".demo/headless").resolve()
PACE = {"seconds_per_batch": 1.0}
PATIENCE = 600.0  # a busy machine takes its time to start Spark

console = Console()


class Fabric(FabricByHand):
    """The fabric from nothing, with its runs in processes of their own."""

    def __init__(self, home: Path) -> None:
        shutil.rmtree(home, ignore_errors=True)
        (home / "dagster").mkdir(parents=True)
        (home / "dagster" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        (home / "bronze.json").write_text(json.dumps({"ops": {"bronze_orders": {"config": PACE}}}))
        super().__init__(home)
        self.log = home / "runs.log"

    def start(self, job: str) -> subprocess.Popen[bytes]:
        """A run, in a process group of its own so that all of it can be killed at once."""
        options = ["-c", str(self.home / "bronze.json")] if job == "load_bronze" else []
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dagster", "job", "execute", "-m", "definitions.fabric", "-j", job, *options],
                env={**os.environ, "DAGSTER_HOME": str(self.home / "dagster"), "FABRIC_HOME": str(self.home)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, run: subprocess.Popen[bytes]) -> None:
        if run.wait(PATIENCE) != 0:
            raise RuntimeError(f"a run failed: see {self.log}")

    def value(self, asset: str) -> pd.DataFrame:
        with dg.DagsterInstance.from_config(str(self.home / "dagster")) as instance:
            found: Any = self.defs.load_asset_value(asset, python_type=pd.DataFrame, instance=instance)
            return pd.DataFrame(found)


def main() -> int:
    arguments = ArgumentParser(
        prog="python -m definitions.fabric_demo", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    arguments.add_argument("--files", type=int, default=120, help="how many files land (default: %(default)s)")
    files = arguments.parse_args().files
    if files < 80:
        arguments.error("--files: 80 or more, or the queue has room for all of them")
    began = time.monotonic()
    logging.disable(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # products have names that not every terminal can show
    there = Fabric(HOME)
    write_files(HOME / "landing", files)
    say(f"{files} files landed in {HOME / 'landing'}")
    enqueue_what_fits(there)
    lost = kill_a_run(there, "landing", "load_bronze", after=1)
    work_off(there, "landing", "load_bronze", files)
    for sensor, queue, job in (("bronze_batches", "refine", "refine_silver"), ("touched_days", "days", "compute_gold")):
        say(f"{sensor}: {there.tick(sensor)}")
        work_off(there, queue, job)
    say("results are gathered, Iceberg tables committed and governance tables made")
    for run in [there.start("show_results"), there.start("govern")]:
        there.finish(run)
    holds = report(there, lost)
    say(f"that took {time.monotonic() - began:.0f} seconds")
    return 0 if holds else 1


def enqueue_what_fits(there: Fabric) -> None:
    before = -1
    while before != (before := there.queue().stats().pending):
        say(f"landing_files: {there.tick('landing_files')}")


def kill_a_run(there: Fabric, name: str, job: str, after: int = 0) -> int:
    """Kill a run while it holds leases, once that many items are completed. Gives how many leases it held."""
    queue = there.queue(name)
    while True:
        say(f"a run of {job} works on {name}, and will be killed")
        run = there.start(job)
        try:
            wait_for(lambda: queue.stats().completed >= after and len(queue.leases()) > 0, run, there.log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        stats = queue.stats()
        if stats.active:
            say(f"it was killed with SIGKILL: {stats.completed} items were done, and it held {stats.active} leases")
            return stats.active
        if not stats.pending:
            raise RuntimeError("the run was done before it could be killed: try again with more --files")


def work_off(there: Fabric, name: str, job: str, items: int = 0) -> None:
    """Run after run until the queue is empty, while the sensor enqueues the rest of the files as there is room."""
    queue = there.queue(name)
    deadline = time.monotonic() + PATIENCE
    while (stats := queue.stats()).pending + stats.active or items > stats.completed + stats.dead:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the queue {name} does not get empty: see {there.log}")
        say(f"a run works on {name}: {stats.pending} items wait, {stats.active} are leased")
        run = there.start(job)
        while run.poll() is None:
            before, said = there.cursors["landing_files"], there.tick("landing_files")
            if there.cursors["landing_files"] != before:
                say(f"landing_files: {said}")
            time.sleep(0.5)
        if run.returncode:  # on a machine that is too busy for heartbeats, leases may be lost: others take over
            say(f"that run failed: see {there.log}")
    say(f"{name} is empty: {stats.completed} items completed, {stats.dead} dead letters")


def wait_for(true: Callable[[], bool], run: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run did not get to work: see {log}")
        time.sleep(0.02)


def report(there: Fabric, lost: int) -> bool:
    """Print what happened; whether all of it is exact."""
    expected = tally(there.home / "landing", MOST_BYTES)
    assets, lake = by_assets(there.queue(), there.value), by_iceberg(there.queue(), there.resources)
    silver = revenue_of_versions(there.resources["catalog"].table("lake.silver_orders").scan().to_arrow().to_pandas())
    log = Counter(event.type for event in events(there.queue()))
    for table in (
        comparison("What was put aside, and why", "problem", {**expected.problems}, assets.problems, lake.problems),
        comparison("Daily revenue by category", "day", *(_days(each) for each in (expected, assets, lake))),
        comparison("Top products", "product", *(_products(each) for each in (expected, assets, lake))),
        comparison("Altogether", "what", *(_counts(each) for each in (expected, assets, lake))),
    ):
        console.print()
        console.print(table)
    console.print()
    say(f"leases that expired with the killed run: {log['Expired']} of the {lost} it held")
    say(f"times that backpressure went on or off: {log['BackpressureChanged']}")
    say(f"governance, by attempts an item took: {governance(there.home / 'governance')}")
    exact = expected == assets == lake and silver == expected.total
    holds = exact and log["Expired"] >= lost and log["BackpressureChanged"] >= 2
    if holds:
        console.print("\nEvery good record of every file was counted, and counted once.", style="bold green")
    else:
        console.print("\nThe numbers differ: this is a bug, please report it.", style="bold red")
    return holds


def governance(storage: Path) -> dict[int, int]:
    """Of the item history that Spark made of the log: how many items took how many attempts."""
    frames = [pd.read_parquet(file, columns=["attempts"]) for file in table_files(storage, "item_history")]
    return dict(sorted(Counter(int(attempts) for frame in frames for attempts in frame["attempts"]).items()))


def events(queue: LeaseQueue) -> Iterator[LeaseEvent]:
    after = 0
    while some := queue.events(after=after, limit=10_000):
        yield from some
        after = some[-1].sequence_number


def _days(found: Tally) -> dict[str, Any]:
    return {f"{day} {category}": worth for (day, category), (_, worth) in found.revenue.items()}


def _products(found: Tally) -> dict[str, Any]:
    return dict(sorted(found.products.items(), key=lambda each: (-each[1], each[0])))


def _counts(found: Tally) -> dict[str, Any]:
    counts = {"files": found.files, "records": found.records, "orders": found.orders}
    return {**counts, "revenue": found.total}


def comparison(title: str, heading: str, files: dict[str, Any], assets: dict[str, Any], lake: dict[str, Any]) -> Table:
    """What the files, the assets and the Iceberg tables say, side by side."""
    table = Table(heading, title=title)
    for column in ("files", "assets", "Iceberg"):
        table.add_column(column, justify="right")
    table.add_column("")
    for name in dict.fromkeys((*files, *assets, *lake)):
        said = [each.get(name, 0) for each in (files, assets, lake)]
        same = len(set(said)) == 1
        table.add_row(name, *(f"{each:,}" for each in said), "[green]ok[/]" if same else "[bold red]DIFFERS[/]")
    return table


def say(text: str) -> None:
    console.print(f"[bold]*[/] {text}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
