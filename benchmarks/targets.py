"""What the queue has to reach, as ratios within one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.in_dagster.findings import Findings
from benchmarks.results import Results

OURS = {"sqlite": "omnirelay-sqlite", "postgres": "omnirelay-postgres"}
RAW = {"sqlite": "raw-sqlite3", "postgres": "raw-psycopg"}
TITLES = {"sqlite": "SQLite", "postgres": "PostgreSQL"}
NOISE = 0.95  # "no throughput lost as workers are added" allows for this much of the machine's own noise


@dataclass(frozen=True)
class Target:
    work: str
    needed: str
    reached: float | None
    verdict: str

    def row(self) -> dict[str, Any]:
        return asdict(self)


def check(results: Results) -> list[Target]:
    """The targets of all parts that were measured; a part of which there is nothing is left out."""
    queues = [*_sqlite(results), *_postgres(results), *_growth(results)] if results.contenders else []
    return [*queues, *_dagster(results.dagster)]


def _sqlite(results: Results) -> Iterator[Target]:
    ours, raw = OURS["sqlite"], RAW["sqlite"]
    hundred, one = (ours, 100, 1), (ours, 1, 1)
    yield _at_least("SQLite, batches of 100: cycle against huey", 4.0, results.ratio(hundred, ("huey", 100, 1)))
    yield _at_least("SQLite, batches of 100: cycle against the raw loop", 0.3, results.ratio(hundred, (raw, 100, 1)))
    yield _at_least("SQLite, one item a call: cycle against the raw loop", 0.4, results.ratio(one, (raw, 1, 1)))


def _postgres(results: Results) -> Iterator[Target]:
    ours = OURS["postgres"]
    for batch, label, needed, floor in ((100, "batches of 100", 1.3, 1.0), (1, "one item a call", 1.0, None)):
        peer = results.best_peer("postgres", batch, 1)
        reached = results.ratio((ours, batch, 1), (peer, batch, 1)) if peer else None
        yield _at_least(f"PostgreSQL, {label}: cycle against {peer or 'the best peer'}", needed, reached, floor)
    yield _at_least(
        "PostgreSQL, batches of 100: 8 workers against 1", 1.3, results.ratio((ours, 100, 8), (ours, 100, 1))
    )
    steps = [
        results.ratio((ours, 100, more), (ours, 100, fewer))
        for fewer, more in zip(results.workers, results.workers[1:], strict=False)
    ]
    found = [step for step in steps if step is not None]
    yield _at_least(
        "PostgreSQL, batches of 100: smallest gain of a step to more workers", NOISE, min(found, default=None)
    )
    if found:
        failed = [sample for sample in results.failures("postgres") if sample.contender == ours]
        yield Target("PostgreSQL: runs lost to deadlocks or errors", "0", len(failed), "MISS" if failed else "PASS")


def _growth(results: Results) -> Iterator[Target]:
    p50 = {(row.contender, row.depth, row.limit): row.p50_ms for row in results.latency}
    shallow, deep = results.depths
    for store, ours in OURS.items():
        for limit in sorted({limit for name, _, limit in p50 if name == ours}):
            reached = p50[ours, deep, limit] / p50[ours, shallow, limit]
            work = f"{TITLES[store]}: p50 of lease(limit={limit}) at {deep:,} pending against {shallow:,}"
            yield Target(work, "at most 1.3x", reached, "PASS" if reached <= 1.3 else "MISS")
    for row in results.streaming:
        if row.contender in OURS.values():
            work = f"{TITLES[row.store]}: memory growth, MiB, as {row.items:,} items stream in"
            yield Target(work, "under 150", row.growth_mib, "PASS" if row.growth_mib < 150 else "MISS")


def _dagster(findings: Findings | None) -> Iterator[Target]:
    if findings is None:
        return
    for row in findings.drainings:
        yield _at_least(f"Dagster, {row.how}: items/s drained against a run an item", 300, row.ratio)
    for sensor in dict.fromkeys(tick.sensor for tick in findings.ticks):
        growth = findings.tick_growth(sensor)
        if growth is not None:
            lengths = sorted({tick.events for tick in findings.ticks})
            work = f"Dagster: tick of a sensor ({sensor}), {lengths[-1]:,} events in the log against {lengths[0]:,}"
            yield Target(work, "at most 1.3x", growth, "PASS" if growth <= 1.3 else "MISS")


def _at_least(work: str, needed: float, reached: float | None, floor: float | None = None) -> Target:
    wanted = f"at least {needed:g}x" + (f" (floor {floor:g}x)" if floor else "")
    if reached is None:
        verdict = "not measured"
    elif reached >= needed:
        verdict = "PASS"
    else:
        verdict = "FLOOR" if floor and reached >= floor else "MISS"
    return Target(work, wanted, reached, verdict)
