"""Committers at the same time: each batch once, whoever wins, on SQLite and on PostgreSQL."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from omnirelay_dagster.iceberg import CommitContended
from omnirelay_dagster.iceberg import table as table_module
from tests.iceberg.committer import start, stepping_catalog
from tests.iceberg.lake import ASSET, NAMESPACE, Lake, expected, numbered, pairs


@pytest.fixture(params=["sqlite", "postgresql"])
def shared(request: pytest.FixtureRequest, lake: Lake) -> Lake:
    if request.param == "postgresql":
        lake.catalog_url = request.getfixturevalue("postgres_url")
    return lake


def test_two_processes_commit_each_batch_once(shared: Lake) -> None:
    for batch in range(16):
        shared.publish(numbered(batch))
    both = [start(shared, batches_per_commit=1) for _ in range(2)]
    for process in both:
        process.join(120)
    assert [process.exitcode for process in both] == [0, 0]

    table = shared.table()
    assert pairs(table) == expected(16)
    assert [mark(each) for each in snapshots(table)] == sorted({mark(each) for each in snapshots(table)})
    assert len(snapshots(table)) == 16, "one batch in a snapshot, and no snapshot twice"


def snapshots(table: Any) -> list[Any]:
    return sorted(table.load().metadata.snapshots, key=lambda each: each.sequence_number)


def mark(snapshot: Any) -> int:
    return int(snapshot.summary.additional_properties[f"omnirelay.{NAMESPACE}.sequence"])


def test_an_append_that_has_become_stale_is_not_moved_onto_the_new_snapshot(shared: Lake) -> None:
    """One committer has staged its batches when another commits the very same ones."""
    for batch in range(3):
        shared.publish(numbered(batch))
    reports = []

    def step(name: str) -> None:
        if name == "staged" and not reports:
            reports.append(None)
            reports.append(shared.table().commit_published(shared.fenced, ASSET))

    slow = shared.table().commit_published(shared.fenced, ASSET, step=step)
    assert reports[1].batches == 3
    assert (slow.batches, slow.commits, slow.total_rows) == (0, 0, 9)
    assert pairs(shared.table()) == expected(3)


def test_a_first_batch_that_two_committers_make_the_table_for(shared: Lake) -> None:
    shared.publish(numbered(0))
    inner = []

    def step(name: str) -> None:
        if name == "planned" and not inner:
            inner.append(None)
            inner.append(shared.table().commit_published(shared.fenced, ASSET))

    outer = shared.table().commit_published(shared.fenced, ASSET, step=step)
    assert (inner[1].batches, outer.batches) == (1, 0)
    assert pairs(shared.table()) == expected(1)


def test_a_commit_whose_answer_is_lost_is_not_repeated(lake: Lake) -> None:
    """The catalog's database goes away after the commit and before it could say so."""
    for batch in range(4):
        lake.publish(numbered(batch))
    lost = []

    def step(name: str) -> None:
        if name == "swapped" and len(lost) < 2:
            lost.append(name)
            if len(lost) == 2:  # the first one made the table
                raise sa.exc.OperationalError("UPDATE", {}, Exception("server closed the connection unexpectedly"))

    report = lake.table(stepping_catalog(lake, step)).commit_published(lake.fenced, ASSET, batches_per_commit=2)
    assert len(lost) == 2
    assert report.total_rows == 12
    assert pairs(lake.table()) == expected(4)


def test_others_that_never_stop_are_not_waited_for_for_ever(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "_MOST_ATTEMPTS", 3)
    for batch in range(2):
        lake.publish(numbered(batch))
    lake.table().commit_published(lake.fenced, ASSET, as_of=3)

    def step(name: str) -> None:
        if name == "staged":
            lake.table().load().append(numbered(99))  # type: ignore[union-attr]

    with pytest.raises(CommitContended, match="3 attempts"):
        lake.table().commit_published(lake.fenced, ASSET, step=step)
    assert lake.table().commit_published(lake.fenced, ASSET).batches == 1
