"""Telling people what ran and what went wrong."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.simulation import faults

if TYPE_CHECKING:
    from tests.simulation.record import HistoryFailed, Tally


def reproducing_command(failure: HistoryFailed) -> str:
    arguments = f"--seed {failure.seed} --steps {failure.steps}"
    if failure.url != "sqlite://":
        arguments += f" --url {failure.url}"
    if failure.exclusive:
        arguments += f" --exclusive {failure.exclusive}"
    return f"make sim ARGS={shlex.quote(arguments)}"


def tell_failure(failure: HistoryFailed) -> str:
    lines = [
        f"seed {failure.seed} went wrong at step {failure.step} on {failure.url}:",
        f"  {type(failure.cause).__name__}: {failure.cause}",
        "",
        f"the queue: {failure.scenario.main}",
        f"the other: {failure.scenario.other}",
        "",
        f"the last {len(failure.last)} things that happened:",
        *(f"  {line}" for line in failure.last),
        "",
        f"to see it again:  {reproducing_command(failure)}",
    ]
    return "\n".join(lines)


def summary(tally: Tally, seconds: float, console: Console) -> None:
    """Operations and faults, side by side."""
    table = Table(title=f"{tally.histories} histories, {tally.events} events, {seconds:.1f} s")
    for column, justify in (("operation", "left"), ("ran", "right"), ("fault", "left"), ("fired", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    known = [*faults.EVERYWHERE, *faults.ON_FILES, *faults.ON_SERVERS]
    fired = [(fault, tally.faults[fault]) for fault in dict.fromkeys(known)]
    ran = sorted(tally.operations.items(), key=lambda each: -each[1])
    for at in range(max(len(ran), len(fired))):
        operation = ran[at] if at < len(ran) else ("", "")
        fault = fired[at] if at < len(fired) else ("", "")
        table.add_row(operation[0], str(operation[1]), fault[0], str(fault[1]))
    console.print(table)
