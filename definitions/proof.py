"""What the workers' ledgers and the queue's log say after the demo, side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from lease_core import LeaseEvent, LeaseQueue


class Entry(NamedTuple):
    """One line of a ledger: work that was done, under the lease with this fence."""

    worker: str
    order: str
    cents: int
    fence: int


class Check(NamedTuple):
    claim: str
    expected: int
    found: int
    or_more: bool = False  # a machine that is very busy may cost further leases, which does no harm

    @property
    def holds(self) -> bool:
        return self.found >= self.expected if self.or_more else self.found == self.expected


@dataclass
class Evidence:
    """The orders that went in, the log, and the ledgers. Only work done under a completed lease counts."""

    orders: Mapping[str, int]
    log: list[LeaseEvent]
    ledgers: list[Entry]
    head: int

    @classmethod
    def gather(cls, orders: Mapping[str, int], queue: LeaseQueue, directory: Path) -> Evidence:
        log: list[LeaseEvent] = []
        while some := queue.events(after=len(log), limit=10_000):
            log.extend(some)
        return cls(orders, log, list(_ledgers(directory)), queue.stats().head)

    def count(self, kind: str) -> int:
        return sum(event.type == kind for event in self.log)

    @cached_property
    def completed_fences(self) -> set[int]:
        return {event.token.fence for event in self.log if event.type == "Completed" and event.token}

    @cached_property
    def counted(self) -> list[Entry]:
        return [entry for entry in self.ledgers if entry.fence in self.completed_fences]

    def uncounted(self, worker: str) -> int:
        """Work that a worker did for nothing: it died before the complete, or came too late with it."""
        return sum(entry.worker == worker and entry.fence not in self.completed_fences for entry in self.ledgers)

    def checks(self, lost_by_kill: int, lost_by_pause: int, paused: str) -> list[Check]:
        total, taken_over = len(self.orders), lost_by_kill + lost_by_pause
        done = Counter(entry.order for entry in self.counted)
        completed = Counter(event.sequence_id for event in self.log if event.type == "Completed")
        grants = Counter(event.sequence_id for event in self.log if event.type == "LeaseGranted")
        dense = sum(event.sequence_number == n for n, event in enumerate(self.log, start=1))
        return [
            Check("orders enqueued", total, self.count("Enqueued")),
            Check("orders completed, says the log", total, len(completed)),
            Check("orders processed, say the ledgers", total, len(done)),
            Check("cents processed, say the ledgers", sum(self.orders.values()), sum(e.cents for e in self.counted)),
            Check("orders lost", 0, len(self.orders.keys() - done.keys())),
            Check("orders done twice", 0, sum(n > 1 for n in (*done.values(), *completed.values()))),
            Check("leases taken over from dead or paused", taken_over, self.count("Expired"), or_more=True),
            Check("orders that took two attempts", taken_over, sum(n > 1 for n in grants.values()), or_more=True),
            Check("late completes refused", lost_by_pause, self.uncounted(paused), or_more=True),
            Check("log numbers without a gap", self.head, dense),
        ]

    def by_worker(self, fates: Mapping[str, str]) -> Table:
        table = Table("worker", title="Who did what")
        for heading in ("orders", "amount", "not counted"):
            table.add_column(heading, justify="right")
        table.add_column("what happened to it")
        for worker, fate in fates.items():
            own = [entry for entry in self.counted if entry.worker == worker]
            amount = sum(entry.cents for entry in own) / 100
            table.add_row(worker, f"{len(own):,}", f"{amount:,.2f}", f"{self.uncounted(worker):,}", fate)
        return table

    def by_event(self) -> Table:
        table = Table("event", title="What the log says")
        table.add_column("times", justify="right")
        for kind, times in Counter(event.type for event in self.log).most_common():
            table.add_row(kind, f"{times:,}")
        return table


def as_table(checks: list[Check]) -> Table:
    table = Table("claim", title="Nothing lost, nothing done twice")
    for heading in ("expected", "found"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for check in checks:
        verdict = "[green]ok[/]" if check.holds else "[bold red]FAILED[/]"
        expected = f"{check.expected:,}" + (" or more" if check.or_more else "")
        table.add_row(check.claim, expected, f"{check.found:,}", verdict)
    return table


def _ledgers(directory: Path) -> list[Entry]:
    return [
        Entry(path.stem, **json.loads(line))
        for path in sorted(directory.glob("*.ledger"))
        for line in path.read_text().splitlines()
    ]
