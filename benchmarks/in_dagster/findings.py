"""What was measured in Dagster, and the arithmetic on it: all of it seconds, taken in turns within one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HOW = {
    "overhead": "dg.materialize in one process, instance on SQLite, same body and IO manager, in turns",
    "launched": "from the sensor daemon's tick to the end of the last run, each in a run worker process of its own, "
    "launched by the default launcher at once, in-process executor, runs share the machine's cores",
    "in process": "job.execute_in_process one after the other, no daemon, launch or imports: kinder to a run an item",
    "ticks": "an evaluation with a caught-up cursor, in turns; the queue is opened and closed by each unless said",
}


@dataclass(frozen=True)
class Overhead:
    """Runs of a plain and of a leased asset over the same items, and the bare lease and complete, round by round."""

    batch: int
    plain: list[float]
    leased: list[float]
    bare_queue: list[float]

    @property
    def per_run(self) -> float:
        """Seconds that leasing adds to a run: the median of the differences of each round."""
        return statistics.median(mine - other for mine, other in zip(self.leased, self.plain, strict=True))

    @property
    def per_item(self) -> float:
        return self.per_run / self.batch

    @property
    def ratio(self) -> float:
        return statistics.median(mine / other for mine, other in zip(self.leased, self.plain, strict=True))


@dataclass(frozen=True)
class Draining:
    """The same work both ways, round by round: ``items`` by one draining run, ``runs`` items by a run each."""

    how: str
    items: int
    drained: list[float]
    runs: int
    one_by_one: list[float]

    @property
    def drained_rate(self) -> float:
        return self.items / statistics.median(self.drained)

    @property
    def one_by_one_rate(self) -> float:
        return self.runs / statistics.median(self.one_by_one)

    @property
    def ratio(self) -> float:
        rounds = zip(self.drained, self.one_by_one, strict=True)
        return statistics.median(self.items / mine / (self.runs / other) for mine, other in rounds)


@dataclass(frozen=True)
class Tick:
    sensor: str
    events: int  # in the log
    p50_ms: float
    p99_ms: float
    ticks: int


@dataclass
class Findings:
    """The Dagster part of the results. It has a date and a machine of its own, for it can be measured alone."""

    quick: bool
    measured_on: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=lambda: dict(HOW))
    overheads: list[Overhead] = field(default_factory=list)
    drainings: list[Draining] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)

    def tick_growth(self, sensor: str) -> float | None:
        """How much longer the tick is with the longest log than with the shortest."""
        by_events = {tick.events: tick.p50_ms for tick in self.ticks if tick.sensor == sensor}
        return by_events[max(by_events)] / by_events[min(by_events)] if len(by_events) > 1 else None

    def summary(self) -> dict[str, Any]:
        """Medians and ratios for people who read the file."""
        return {
            "overheads": [
                {"batch": row.batch, "ms_per_run": row.per_run * 1e3, "us_per_item": row.per_item * 1e6}
                for row in self.overheads
            ],
            "drainings": [
                {
                    "how": row.how,
                    "drained_items_per_second": row.drained_rate,
                    "run_an_item_items_per_second": row.one_by_one_rate,
                    "ratio": row.ratio,
                }
                for row in self.drainings
            ],
        }

    @classmethod
    def read(cls, document: dict[str, Any]) -> Findings:
        rows = {"overheads": Overhead, "drainings": Draining, "ticks": Tick}
        read = {key: [row(**entry) for entry in document[key]] for key, row in rows.items()}
        return cls(**{key: value for key, value in document.items() if key != "summary"} | read)


def percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]
