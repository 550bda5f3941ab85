"""The governance tables: equal to a plain pass over the events, whatever is cut, repeated or killed on the way."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import EventsPruned, InvalidInput
from omnirelay_dagster.spark.governance import bring_up_to_date, read_table, table_files
from omnirelay_dagster.spark.governance.folding import Thresholds
from omnirelay_dagster.spark.governance.stored import Manifest, Storage, UpdateConflict
from tests.conformance.clock import FakeClock
from tests.spark_log.histories import come_from_elsewhere, live
from tests.spark_log.oracle import ACTIONS, Oracle
from tests.spark_log.rows import events_of

LIMITS = Thresholds(window=timedelta(hours=12), min_leases=5, min_bounces=3)


class Killed(Exception):
    pass


@pytest.fixture
def queue(tmp_path: Path, clock: FakeClock) -> Any:
    from lease_core import QueueConfig

    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with (
        LeaseQueue.open(url, "main", QueueConfig(max_attempts=3), clock=clock) as here,
        LeaseQueue.open(url, "far", clock=clock) as there,
    ):
        come_from_elsewhere(here, there, clock)
        yield here


def update(spark: Any, queue: LeaseQueue, storage: Path, **more: Any) -> Any:
    url = f"sqlite:///{storage.parent / 'queue.db'}"
    return bring_up_to_date(spark, url=url, namespace="main", storage=storage, thresholds=LIMITS, **more)


def rows(storage: Path, table: str) -> list[dict[str, Any]]:
    """The table as any reader of parquet sees it."""
    files = table_files(storage, table)
    found: list[dict[str, Any]] = pq.read_table(files, partitioning=None).to_pylist() if files else []
    return found


def check(queue: LeaseQueue, storage: Path) -> None:
    """All tables say what a plain pass over the events says."""
    oracle = Oracle(events_of(queue))
    items = {row.pop("sequence_id"): row for row in rows(storage, "item_history")}
    assert {row.pop("namespace") for row in items.values()} == {"main"}
    assert items == oracle.items
    keys = ("hour", "peer_id", "principal", "resource_type", "resource_id")
    activity = rows(storage, "peer_activity")
    assert len(activity) == len(oracle.activity)
    assert {
        tuple(row[key] for key in keys): {n: row[n] for n in ("first_at", "last_at", *ACTIONS.values())}
        for row in activity
    } == oracle.activity
    check_latency(oracle, storage)
    found = rows(storage, "anomalies")
    told = {
        (row["kind"], *((row["peer_id"],) if row["peer_id"] else (row["resource_type"], row["resource_id"]))): (
            row["leases"],
            row["times"],
        )
        for row in found
    }
    assert len(told) == len(found)
    assert told == oracle.anomalies(LIMITS.window, LIMITS.min_leases, LIMITS.min_bounces)
    assert {row["as_of"] for row in found} <= {oracle.as_of}


def check_latency(oracle: Oracle, storage: Path) -> None:
    told = {row["hour"]: row for row in rows(storage, "lease_latency")}
    expected = oracle.latency()
    assert told.keys() == expected.keys()
    for hour, row in expected.items():
        counts = {"wait_count": "granted", "processing_count": "ended"}
        for name, value in row.items():
            assert told[hour][counts.get(name, f"{name}_us")] == pytest.approx(value), (hour, name)


def test_the_tables_are_what_a_plain_pass_gives(
    spark: Any, queue: LeaseQueue, clock: FakeClock, tmp_path: Path
) -> None:
    """In steps that cut documents, over several updates; then again with nothing new. One step: see below."""
    storage = tmp_path / "tables"
    live(queue, clock, seed=11, steps=90)
    first = update(spark, queue, storage, max_events=queue.stats().head // 2 + 1)
    assert (first.steps, first.events) == (2, queue.stats().head)
    check(queue, storage)
    live(queue, clock, seed=12, steps=60)
    clock.advance(90_000)
    live(queue, clock, seed=13, steps=60)
    second = update(spark, queue, storage)
    assert second.manifest.watermark == queue.stats().head
    check(queue, storage)
    seen = {row["outcome"] for row in rows(storage, "item_history")}
    assert {"pending", "completed", "dead"} <= seen
    third = update(spark, queue, storage)
    assert (third.steps, third.events, third.manifest) == (0, 0, second.manifest)
    files = table_files(storage, "item_history")
    totals = duckdb.sql("SELECT count(*), sum(attempts) FROM read_parquet(?)", params=[files]).fetchone()
    frame = read_table(spark, storage, "item_history")
    assert frame.count() == frame.select("sequence_id").distinct().count() == len(rows(storage, "item_history"))
    assert totals == (len(Oracle(events_of(queue)).items), sum(e.type == "LeaseGranted" for e in events_of(queue)))


@pytest.mark.parametrize(
    "points",
    [("before-commit", "after-commit"), pytest.param(("read", "begun", "half-written"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_a_crash_at_any_point_loses_and_doubles_nothing(
    spark: Any, queue: LeaseQueue, clock: FakeClock, tmp_path: Path, points: tuple[str, ...]
) -> None:
    storage = tmp_path / "tables"
    for seed, point in enumerate(points):
        live(queue, clock, seed=seed, steps=15)

        def probe(reached: str, point: str = point) -> None:
            if reached == point:
                raise Killed(point)

        before = Storage(storage).current()
        with pytest.raises(Killed):
            update(spark, queue, storage, probe=probe)
        assert (Storage(storage).current() == before) is (point != "after-commit")
    update(spark, queue, storage)
    check(queue, storage)
    attempts = {path.name for path in (storage / "data").iterdir()}
    named = {
        path.split("/")[1] for t in Storage(storage).current().tables for path in Storage(storage).current().files(t)
    }  # type: ignore[union-attr]
    assert named <= attempts


def test_of_two_updates_at_once_one_starts_over(
    spark: Any, queue: LeaseQueue, clock: FakeClock, tmp_path: Path
) -> None:
    storage = tmp_path / "tables"
    live(queue, clock, seed=3, steps=20)
    said: list[str] = []
    rivals = iter([True])

    def probe(reached: str) -> None:
        if reached == "before-commit" and next(rivals, False):
            update(spark, queue, storage)  # another one, start to end, just before this one commits

    result = update(spark, queue, storage, probe=probe, log=said.append)
    assert any("made by another update" in line for line in said)
    assert (result.steps, result.manifest.version) == (0, 1)
    check(queue, storage)


def test_what_cannot_go_on_is_refused_with_the_reason(spark: Any, queue: LeaseQueue, tmp_path: Path) -> None:
    storage = tmp_path / "tables"
    head = queue.stats().head
    with pytest.raises(InvalidInput, match="no tables in"):
        read_table(spark, storage, "anomalies")
    with pytest.raises(InvalidInput, match="there is no table 'x'"):
        table_files(storage, "x")
    Storage(storage).commit(Manifest("main", queue.queue_id, version=1, watermark=head))
    with pytest.raises(UpdateConflict):
        Storage(storage).commit(Manifest("main", queue.queue_id, version=1, watermark=0))
    queue.enqueue([WorkItem("file", "a")])
    queue.enqueue([WorkItem("file", "b")])
    queue.prune_events(before=head + 2)
    with pytest.raises(EventsPruned, match=f"read up to event {head}, but the log was pruned and begins at {head + 2}"):
        update(spark, queue, storage)
    Storage(storage).commit(Manifest("main", "another queue", version=2, watermark=1))
    with pytest.raises(InvalidInput, match="tables of another queue"):
        update(spark, queue, storage)
