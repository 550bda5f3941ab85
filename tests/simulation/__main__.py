"""``make sim ARGS="--minutes 5"``, or ``python -m tests.simulation --seed 7`` to see one history again."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation.driver import MEMORY, History
from tests.simulation.record import HistoryFailed, Tally
from tests.simulation.report import summary, tell_failure


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="the first seed; alone, only this one (default: any)")
    parser.add_argument("--runs", type=int, help="how many seeds to run (default: 100, or 1 with --seed)")
    parser.add_argument("--steps", type=int, default=200, help="how long each history is (default: 200)")
    parser.add_argument("--minutes", type=float, help="run for so long, whatever the number of seeds")
    parser.add_argument("--url", default=MEMORY, help="sqlite:// (default), sqlite:/// for files, or postgresql://…")
    parser.add_argument("--exclusive", choices=["none", "resource", "partition"], help="fix the queue's exclusivity")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    asked = arguments(given)
    console = Console()
    first = time.time_ns() % 1_000_000_000 if asked.seed is None else asked.seed
    runs = asked.runs or (1 if asked.seed is not None else 100)
    total, started = Tally(), time.monotonic()
    until = started + asked.minutes * 60 if asked.minutes else None
    failure: HistoryFailed | None = None
    echo = partial(console.print, markup=False, highlight=False)
    columns = (TextColumn("seed {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(str(first), total=None if until else runs)
        seed = first
        while time.monotonic() < until if until else seed < first + runs:
            progress.update(bar, description=str(seed))
            history = History(seed, asked.url, asked.exclusive)
            history.echo = echo if asked.verbose else None
            try:
                total.add(history.run(asked.steps))
            except HistoryFailed as failed:
                failure = failed
                break
            progress.advance(bar)
            seed += 1
    summary(total, time.monotonic() - started, console)
    if failure is not None:
        console.print(tell_failure(failure), style="red", markup=False, highlight=False, soft_wrap=True)
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
