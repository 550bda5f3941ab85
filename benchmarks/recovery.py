"""Getting a queue back, against the least it could cost: `python -m benchmarks --only recovery`.

A queue is filled (enqueue, lease, complete in batches of 100) and rebuilt, on SQLite at full durability, from its own
log and from JSON lines. The limit is a raw sqlite3 loop that inserts the very rows of the rebuilt queue into the same
tables, 10,000 a transaction: it reads nothing, decodes nothing and decides nothing. What a snapshot saves is measured
on the same queue.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.targets import Target
from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.recovery import rebuild, snapshot
from lease_core.replication import JsonlSink, Relay, read_jsonl

BATCH = 100
AT_ONCE = 10_000


def run(scratch: Path, quick: bool, console: Console, results: Path) -> list[Target]:
    """Fill, rebuild in turns, show, and leave the numbers in ``results``."""
    items, rounds = (10_000, 2) if quick else (100_000, 3)
    with LeaseQueue.open(f"sqlite:///{scratch}/original.db", "bench", QueueConfig(durability="relaxed")) as queue:
        console.print(f"filling a queue with {items:,} items")
        _fill(queue, items)
        Relay(queue, JsonlSink(scratch / "lines", fsync=False)).run_once(max_batches=10**9)
        snapshot(queue, scratch / "snapshot")
        events = queue.stats().head
        times = _measure(queue, scratch, rounds, console)
    targets = _targets(times)
    console.print(report.targets_table("Recovery", targets))
    rates = {name: round(events / statistics.median(taken)) for name, taken in times.items()}
    found = {"events": events, "events_per_second": rates, "targets": [asdict(target) for target in targets]}
    (results / f"recovery{'-quick' if quick else ''}.json").write_text(json.dumps(found, indent=1) + "\n")
    return targets


def _fill(queue: LeaseQueue, items: int) -> None:
    for number in range(0, items, BATCH):
        queue.enqueue(
            [WorkItem("file", f"s3://landing/2026/{number + n:09d}.json", body=b"x" * 100) for n in range(BATCH)],
            peer_id="producer",
        )
        queue.complete(queue.lease("worker-1", BATCH), result={"rows": number})


def _measure(queue: LeaseQueue, scratch: Path, rounds: int, console: Console) -> dict[str, list[float]]:
    def rebuilt(source: Any, name: str, **more: Any) -> None:
        plain = QueueConfig(exclusive=None)  # which lines do not say
        rebuild(source, f"sqlite:///{scratch}/{name}.db", namespace="bench", config=plain, **more).close()

    ways: dict[str, Callable[[str], None]] = {
        "from the queue's log": lambda name: rebuilt(queue, name),
        "from JSON lines": lambda name: rebuilt(read_jsonl(scratch / "lines"), name),
        "from a snapshot": lambda name: rebuilt(queue, name, snapshot=scratch / "snapshot"),
    }
    rebuilt(queue, "rows")
    rows = Rows(scratch / "rows.db")
    ways["raw inserts of the same rows"] = lambda name: rows.insert(scratch / f"{name}.db")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for at, (name, act) in enumerate(ways.items()):
            started = time.perf_counter()
            act(f"{number}-{at}")
            times[name].append(time.perf_counter() - started)
        told = "; ".join(f"{name} {taken[-1]:.2f} s" for name, taken in times.items())
        console.print(f"round {number + 1}/{rounds}: {told}", highlight=False, markup=False)
    return times


class Rows:
    """All rows of a queue's database, with the statements that made its tables."""

    def __init__(self, path: Path) -> None:
        with sqlite3.connect(path) as source:
            made = source.execute(
                "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY type DESC"
            ).fetchall()
            tables = [name for name, sql in made if sql.startswith("CREATE TABLE")]
            self._statements = [sql for _, sql in made]
            self._rows = {name: source.execute(f"SELECT * FROM {name}").fetchall() for name in tables}

    def insert(self, path: Path) -> None:
        target = sqlite3.connect(path, isolation_level=None)
        target.execute("PRAGMA journal_mode = WAL")
        target.execute("PRAGMA synchronous = FULL")
        for sql in self._statements:
            target.execute(sql)
        for name, rows in self._rows.items():
            for at in range(0, len(rows), AT_ONCE):
                target.execute("BEGIN")
                marks = ", ".join("?" * len(rows[0]))
                target.executemany(f"INSERT INTO {name} VALUES ({marks})", rows[at : at + AT_ONCE])
                target.execute("COMMIT")
        target.close()


def _targets(times: dict[str, list[float]]) -> list[Target]:
    log, lines, start, raw = times.values()

    def ratio(one: list[float], other: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(one, other, strict=True))

    found = [
        ("rebuild from the queue's log, against raw inserts of the same rows", 0.25, ratio(raw, log)),
        ("rebuild from JSON lines, against raw inserts of the same rows", 0.25, ratio(raw, lines)),
        ("start from a snapshot, against a full replay", 1.0, ratio(log, start)),
    ]
    return [
        Target(work, f"at least {needed:g}x", reached, "PASS" if reached >= needed else "MISS")
        for work, needed, reached in found
    ]
