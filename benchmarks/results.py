"""What was measured, and the arithmetic on it: a ratio is the median of the ratios of each round."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.in_dagster.findings import Findings

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class About:
    """A contender as the tables describe it."""

    name: str
    store: str
    role: str
    batched: list[str]
    many_processes: bool
    completes: bool
    note: str

    def measured_at(self, batch: int) -> int:
        """The batch that stands for this one: what is done one by one costs the same in any batch."""
        return min(batch, {0: 1, 3: batch}.get(len(self.batched), 100))

    def how(self, batch: int) -> str:
        if batch == 1 or len(self.batched) == 3:
            return ""
        return f"only {', '.join(self.batched)} batched" if self.batched else "one by one"


@dataclass(frozen=True)
class Sample:
    """One cell in one round: items per second of each operation, or why there are none."""

    round: int
    contender: str
    batch: int
    workers: int
    rates: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class LeaseLatency:
    contender: str
    store: str
    depth: int
    limit: int
    p50_ms: float
    p99_ms: float
    calls: int


@dataclass(frozen=True)
class Streaming:
    contender: str
    store: str
    items: int
    items_per_second: float
    growth_mib: float
    resident_mib: float


@dataclass
class Results:
    quick: bool
    rounds: int
    cells: list[list[int]]  # [batch, workers]
    depths: list[int]
    measured_on: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    contenders: list[About] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    latency: list[LeaseLatency] = field(default_factory=list)
    streaming: list[Streaming] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)  # measured alone later: when, and on what
    dagster: Findings | None = None

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.cells})

    @property
    def workers(self) -> list[int]:
        return sorted({workers for _, workers in self.cells})

    def about(self, name: str) -> About:
        return next(about for about in self.contenders if about.name == name)

    def of(self, store: str, role: str | None = None) -> list[About]:
        return [c for c in self.contenders if c.store == store and role in (None, c.role)]

    def by_round(self, name: str, batch: int, workers: int, operation: str = "cycle") -> dict[int, float]:
        if all(about.name != name for about in self.contenders):
            return {}
        at = self.about(name).measured_at(batch)
        return {
            sample.round: sample.rates[operation]
            for sample in self.samples
            if (sample.contender, sample.batch, sample.workers) == (name, at, workers) and operation in sample.rates
        }

    def rate(self, name: str, batch: int, workers: int, operation: str = "cycle") -> float | None:
        rates = self.by_round(name, batch, workers, operation)
        return statistics.median(rates.values()) if rates else None

    def ratio(self, ours: tuple[str, int, int], theirs: tuple[str, int, int]) -> float | None:
        """How many times faster a whole cycle is, each given as (contender, batch, workers)."""
        mine, other = self.by_round(*ours), self.by_round(*theirs)
        shared = mine.keys() & other.keys()
        return statistics.median(mine[n] / other[n] for n in shared) if shared else None

    def best_peer(self, store: str, batch: int, workers: int) -> str | None:
        rates = {peer.name: self.rate(peer.name, batch, workers) or 0.0 for peer in self.of(store, "peer")}
        best = max(rates, key=lambda name: rates[name], default=None)
        return best if best and rates[best] else None

    def failures(self, store: str) -> list[Sample]:
        names = {about.name for about in self.of(store)}
        return [sample for sample in self.samples if sample.failure and sample.contender in names]

    def adopt(self, part: str, fresh: Results) -> None:
        """Take over one part that was measured alone; all the others stay as they are."""
        if part == "dagster":
            self.dagster = fresh.dagster
            return
        if part in ("sqlite", "postgres"):
            replaced = {about.name for about in self.of(part)}
            self.contenders = [about for about in self.contenders if about.store != part] + fresh.contenders
            self.samples = [sample for sample in self.samples if sample.contender not in replaced] + fresh.samples
        if part == "latency":
            self.latency = fresh.latency
        if part in ("latency", "memory"):
            self.streaming = fresh.streaming
        self.unavailable |= fresh.unavailable
        for about in fresh.contenders:
            self.unavailable.pop(about.name, None)
        self.problems += [problem for problem in fresh.problems if problem not in self.problems]
        self.versions |= fresh.versions
        self.parts[part] = {"measured_on": fresh.measured_on, "machine": fresh.machine}

    def same_sizes(self, other: Results) -> bool:
        return (self.rounds, self.cells, self.depths) == (other.rounds, other.cells, other.depths)

    def save(self, path: Path, verdicts: list[dict[str, Any]]) -> None:
        """Medians first, for people who read the file; the samples they come from below."""
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "schema_version": SCHEMA_VERSION,
            "targets": verdicts,
            "medians": self._medians(),
            **asdict(self),
        }
        if self.dagster:
            document["dagster"] = {"summary": self.dagster.summary(), **document["dagster"]}
        path.write_text(json.dumps(_rounded(document), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        document = json.loads(path.read_text())
        if document.pop("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"{path} was written by another version of the benchmark")
        del document["targets"], document["medians"]
        rows = {"contenders": About, "samples": Sample, "latency": LeaseLatency, "streaming": Streaming}
        read: dict[str, Any] = {key: [row(**entry) for entry in document[key]] for key, row in rows.items()}
        if document.get("dagster"):
            read["dagster"] = Findings.read(document["dagster"])
        return cls(**document | read)

    def _medians(self) -> list[dict[str, Any]]:
        cells = dict.fromkeys((sample.contender, sample.batch, sample.workers) for sample in self.samples)
        return [
            {"contender": name, "batch": batch, "workers": workers}
            | {
                operation: self.rate(name, batch, workers, operation)
                for operation in ("enqueue", "lease", "complete", "cycle")
            }
            for name, batch, workers in cells
        ]


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
        case list():
            return [_rounded(entry) for entry in value]
        case _:
            return value
