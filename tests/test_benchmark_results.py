"""Results of the benchmark: a part that was measured alone joins the latest ones and leaves the others alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.in_dagster.findings import Draining, Findings, Overhead, Tick
from benchmarks.results import About, Results, Sample
from benchmarks.targets import check


def about(name: str, store: str) -> About:
    return About(name, store, "ours", ["enqueue", "lease", "complete"], True, True, "")


def results(store: str, cycle: float) -> Results:
    name = f"omnirelay-{store}"
    made = Results(False, 1, [[100, 1]], [10, 20], measured_on="2026-01-01", machine={"cores": 2})
    made.contenders.append(about(name, store))
    made.samples.append(Sample(1, name, 100, 1, {"cycle": cycle}))
    return made


def findings(drained: float, tick: float) -> Findings:
    return Findings(
        quick=False,
        overheads=[Overhead(100, [1.0, 2.0, 3.0], [1.5, 2.1, 3.3], [0.1, 0.1, 0.1])],
        drainings=[Draining("launched", 1_000, [drained], 2, [4.0])],
        ticks=[Tick("replication", 10, 2.0, 3.0, 5), Tick("replication", 1_000, tick, 9.0, 5)],
    )


def both(path: Path) -> Results:
    latest = results("sqlite", 10.0)
    latest.adopt("postgres", results("postgres", 20.0))
    latest.dagster = findings(1.0, 2.2)
    latest.save(path, [])
    return Results.read(path)


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    read = both(tmp_path / "latest.json")
    assert read.dagster == findings(1.0, 2.2)
    assert read.rate("omnirelay-sqlite", 100, 1) == 10.0
    assert json.loads((tmp_path / "latest.json").read_text())["dagster"]["summary"]["drainings"][0]["ratio"] == 2000


def test_the_dagster_part_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    latest = both(tmp_path / "latest.json")
    fresh = Results(False, 1, [[100, 1]], [10, 20])
    fresh.dagster = findings(2.0, 3.0)
    latest.adopt("dagster", fresh)
    latest.save(tmp_path / "joined.json", [])
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("latest.json", "joined.json"))
    assert after.pop("dagster") != before.pop("dagster")
    assert after == before


def test_the_part_of_one_store_is_replaced_and_the_other_stays(tmp_path: Path) -> None:
    latest = both(tmp_path / "latest.json")
    latest.adopt("sqlite", results("sqlite", 99.0))
    assert (latest.rate("omnirelay-sqlite", 100, 1), latest.rate("omnirelay-postgres", 100, 1)) == (99.0, 20.0)
    assert latest.dagster is not None
    assert set(latest.parts) == {"sqlite", "postgres"}


@pytest.mark.parametrize(
    ("drained", "tick", "verdicts"),
    [(1.0, 2.2, ["PASS", "PASS"]), (10.0, 2.7, ["MISS", "MISS"]), (6.6, 2.6, ["PASS", "PASS"])],
)
def test_targets_of_the_dagster_part(drained: float, tick: float, verdicts: list[str]) -> None:
    alone = Results(False, 1, [[100, 1]], [10, 20])
    alone.dagster = findings(drained, tick)
    assert [target.verdict for target in check(alone)] == verdicts


def test_overhead_is_the_median_of_the_differences_of_each_round() -> None:
    [row] = findings(1.0, 2.0).overheads
    assert (round(row.per_run, 6), round(row.per_item, 8)) == (0.3, 0.003)


def test_the_results_in_the_repository_can_be_read() -> None:
    latest = Results.read(Path(__file__).parent.parent / "benchmarks" / "results" / "latest.json")
    assert latest.dagster is not None
    assert latest.contenders
