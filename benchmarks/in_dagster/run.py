"""All measurements in Dagster, in one run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.in_dagster.draining import in_process, launched
from benchmarks.in_dagster.findings import Findings
from benchmarks.in_dagster.overhead import overhead
from benchmarks.in_dagster.ticks import ticks

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    rounds_by_batch: Mapping[int, int]
    items: int  # that one run drains
    runs: int  # that get an item each
    rounds: int
    log_lengths: tuple[int, int]
    ticks: int


FULL = Plan({1: 20, 100: 20, 10_000: 10}, 50_000, 10, 2, (10_000, 1_000_000), 200)
QUICK = Plan({1: 3, 100: 3, 10_000: 3}, 10_000, 3, 1, (10_000, 100_000), 30)


def measure(plan: Plan, machine: dict[str, Any], measured_on: str, scratch: Path, say: Say) -> Findings:
    found = Findings(plan is QUICK, measured_on, machine)
    found.versions = {name: importlib.metadata.version(name) for name in ("dagster", "sqlalchemy")}
    for batch, rounds in plan.rounds_by_batch.items():
        row = overhead(batch, rounds, scratch)
        found.overheads.append(row)
        say(f"a leased asset with a batch of {batch:,}: {row.per_run * 1e3:.1f} ms a run more than a plain one")
    found.drainings.append(in_process(plan.items, plan.runs, plan.rounds, scratch))
    say(f"drained in process: {found.drainings[-1].ratio:,.0f}x a run an item")
    found.drainings.append(launched(plan.items, plan.runs, plan.rounds, scratch, say))
    found.ticks = ticks(plan.log_lengths, plan.ticks, scratch, say)
    return found
