"""SIGKILL of the committer between every two of its steps: a batch is in the table with its mark, or not at all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.iceberg.committer import start
from tests.iceberg.lake import ASSET, NAMESPACE, Lake, expected, framed, pairs

# in the order in which a commit takes them; at its second occurrence one commit has landed before
STEPS = (
    ("loaded", 2),
    ("read", 2),
    ("planned", 2),
    ("metadata written", 1),  # of a table that is being made
    ("created", 1),
    ("written", 2),
    ("staged", 2),
    ("metadata written", 3),
    ("swapped", 3),
    ("committed", 2),
    ("noted", 1),
)


@pytest.mark.parametrize(("step", "occurrence"), STEPS, ids=[f"{step} {n}" for step, n in STEPS])
def test_a_killed_committer_loses_and_doubles_nothing(lake: Lake, step: str, occurrence: int) -> None:
    for batch in range(5):
        lake.publish(framed(batch))
    killed = start(lake, step, occurrence)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL

    table = lake.table()
    there = pairs(table) if table.load() else []
    assert there == expected(len(there) // 3), "the table has whole batches, from the first on"
    mark = table.watermark(NAMESPACE)
    assert len(there) // 3 == sum(
        (each.sequence_number or 0) <= (mark.sequence if mark else 0) for each in lake.fenced.published(ASSET)
    )

    report = table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(5)
    assert (report.rows, report.total_rows) == (15 - len(there), 15)
    assert table.commit_published(lake.fenced, ASSET).batches == 0


def test_what_a_killed_committer_leaves_behind_is_tidied(lake: Lake, tmp_path: Path) -> None:
    lake.publish(framed(0))
    lake.table().commit_published(lake.fenced, ASSET)
    lake.publish(framed(1))
    before = {path for path in (tmp_path / "lake").rglob("*") if path.is_file()}
    killed = start(lake, "staged")
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    left = {path for path in (tmp_path / "lake").rglob("*") if path.is_file()} - before
    assert {path.suffix for path in left} == {".parquet", ".avro"}

    table = lake.table()
    assert table.tidy() == [], "whatever is younger than a day may be somebody's work"
    assert {Path(each.removeprefix("file://")) for each in table.tidy(older_than=0)} == left
    assert {path for path in (tmp_path / "lake").rglob("*") if path.is_file()} == before
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(2)
