"""How far the log is in the table: said by the snapshot itself, through rollbacks, expiry and other writers."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dagster import build_output_context

from lease_core.errors import EventsPruned, InvalidInput
from omnirelay_dagster.iceberg import FilesWrong, LogMismatch, SnapshotExpired, WatermarkLost
from omnirelay_dagster.iceberg.watermark import key_of
from omnirelay_dagster.manifest import READER
from tests.iceberg.lake import ASSET, NAMESPACE, Lake, expected, numbered, pairs


def fill(lake: Lake, batches: int, **options: Any) -> Any:
    """A table with a snapshot for each batch."""
    table = lake.table(**options)
    for batch in range(batches):
        lake.publish(numbered(batch))
    table.commit_published(lake.fenced, ASSET, batches_per_commit=1)
    return table


def test_batches_come_in_the_order_of_the_log_many_in_a_commit(lake: Lake) -> None:
    for batch in range(7):
        lake.publish(numbered(batch))
        lake.publish(numbered(100), asset="another")
    seen = []
    report = lake.table().commit_published(lake.fenced, ASSET, batches_per_commit=3, progress=seen.append)
    assert [(each.batches, each.rows) for each in seen] == [(3, 9), (3, 9), (1, 3)]
    assert (report.commits, report.batches, report.files, report.total_files) == (3, 7, 7, 7)
    assert report.sequence == lake.queue.stats().head
    numbers = [each.sequence_number for each in lake.fenced.published(ASSET)]
    assert [each.sequence for each in seen[:2]] == [numbers[2], numbers[5]]
    assert pairs(lake.table()) == expected(7)


def test_a_commit_has_no_more_files_than_allowed(lake: Lake) -> None:
    for batch in range(5):
        lake.publish(numbered(batch))
    seen: list[Any] = []
    lake.table().commit_published(lake.fenced, ASSET, files_per_commit=2, progress=seen.append)
    assert [each.files for each in seen] == [2, 2, 1]
    assert pairs(lake.table()) == expected(5)


def test_the_mark_is_in_the_summary_of_the_snapshot(lake: Lake) -> None:
    table = fill(lake, 1)
    [snapshot] = table.load().metadata.snapshots
    assert snapshot.summary[key_of(NAMESPACE)] == str(lake.queue.stats().head)
    assert snapshot.summary["total-records"] == "3"
    mark = table.watermark(NAMESPACE)
    [published] = lake.fenced.published(ASSET)
    assert (mark.asset, mark.queue) == (ASSET, lake.queue.queue_id)
    assert (mark.batch, mark.lease) == (published.sequence_number, published.lease_id)


def test_nothing_published_makes_no_table(lake: Lake) -> None:
    table = lake.table()
    report = table.commit_published(lake.fenced, ASSET)
    assert (report.snapshot_id, report.sequence, report.batches) == (None, 0, 0)
    assert table.load() is None
    with pytest.raises(InvalidInput, match="nothing was committed"):
        table.scan()


def test_batches_without_rows_are_passed_over(lake: Lake) -> None:
    for batch in (0, 1, 2):
        lake.publish(numbered(batch))
        lake.publish(numbered(batch, 0))
    lake.publish(pa.table({"other": pa.array([], pa.string())}))
    table = lake.table()
    table.commit_published(lake.fenced, ASSET, batches_per_commit=1)
    assert pairs(table) == expected(3)
    assert len(table.load().metadata.snapshots) == 3  # type: ignore[union-attr]
    assert table.waiting(lake.fenced, ASSET) == 2  # they are looked at again, until something comes after them
    lake.publish(numbered(3))
    table.commit_published(lake.fenced, ASSET)
    assert table.waiting(lake.fenced, ASSET) == 0


def test_a_state_can_be_read_as_of_its_number(lake: Lake) -> None:
    table = fill(lake, 4)
    numbers = [each.sequence_number or 0 for each in lake.fenced.published(ASSET)]
    for position, number in enumerate(numbers):
        assert pairs(table, namespace=NAMESPACE, as_of=number) == expected(position + 1)
    assert pairs(table, namespace=NAMESPACE, as_of=numbers[2] + 1) == expected(3)
    with pytest.raises(SnapshotExpired, match=f"as of number {numbers[0]} "):
        table.scan(namespace=NAMESPACE, as_of=numbers[0] - 1)
    with pytest.raises(InvalidInput, match="say of which"):
        table.scan(as_of=3)
    with pytest.raises(InvalidInput, match="nobody"):
        table.scan(namespace="nobody", as_of=3)


def test_committing_up_to_a_number_leaves_the_rest(lake: Lake) -> None:
    for batch in range(3):
        lake.publish(numbered(batch))
    second = lake.fenced.published(ASSET)[1].sequence_number
    table = lake.table()
    assert table.commit_published(lake.fenced, ASSET, as_of=second).batches == 2
    assert table.waiting(lake.fenced, ASSET) == 1
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(3)


def test_after_a_rollback_what_was_taken_back_is_committed_again(lake: Lake) -> None:
    table = fill(lake, 3)
    first = min(table.load().metadata.snapshots, key=lambda each: each.sequence_number)
    with table.load().manage_snapshots() as manage:
        manage.set_current_snapshot(first.snapshot_id)
    assert pairs(table) == expected(1)
    assert table.commit_published(lake.fenced, ASSET).batches == 2
    assert pairs(table) == expected(3)


def test_snapshots_of_others_do_not_hide_the_mark(lake: Lake) -> None:
    table = fill(lake, 2)
    table.load().append(numbered(50))
    table.load().delete("batch == 0")
    lake.publish(numbered(2))
    assert table.commit_published(lake.fenced, ASSET).batches == 1
    assert pairs(table) == [*expected(3)[3:], *((50, row) for row in range(3))]


def test_if_others_expire_every_mark_it_is_said_and_not_guessed(lake: Lake) -> None:
    table = fill(lake, 2)
    table.load().append(numbered(50))
    table.load().append(numbered(51))
    others = table.load()
    old = [each.snapshot_id for each in others.metadata.snapshots if each != others.current_snapshot()]
    others.maintenance.expire_snapshots().by_ids(old).commit()
    lake.publish(numbered(2))
    number = lake.fenced.published(ASSET)[1].sequence_number
    with pytest.raises(WatermarkLost, match=rf"resume_after={number}"):
        table.commit_published(lake.fenced, ASSET)
    assert table.commit_published(lake.fenced, ASSET, resume_after=number).batches == 1
    assert table.commit_published(lake.fenced, ASSET).batches == 0
    assert [pair for pair in pairs(table) if pair[0] < 50] == expected(3)


def test_one_table_can_be_fed_from_two_queues(lake: Lake, tmp_path: Path) -> None:
    second = Lake(tmp_path, namespace="returns")
    second.fenced = second.fenced.model_copy(update={"base_path": str(tmp_path / "out2")})
    table = lake.table(keep_snapshots=1)
    for batch in (0, 2):
        lake.publish(numbered(batch))
        second.publish(numbered(batch + 1))
        table.commit_published(lake.fenced, ASSET)
        table.commit_published(second.fenced, ASSET)
    assert table.commit_published(lake.fenced, ASSET).batches == 0
    assert pairs(table) == expected(4)
    second.close()


def test_another_asset_of_the_queue_needs_another_table(lake: Lake) -> None:
    table = fill(lake, 1)
    lake.publish(numbered(1), asset="silver")
    with pytest.raises(LogMismatch, match="'silver' needs a table of its own"):
        table.commit_published(lake.fenced, "silver")


def test_another_queue_of_the_same_name_is_not_taken_for_the_first(lake: Lake, tmp_path: Path) -> None:
    table = fill(lake, 1)
    other = Lake(tmp_path / "other", lake.catalog_url)
    other.home.mkdir()
    other.publish(numbered(0))
    with pytest.raises(LogMismatch, match="another queue"):
        table.commit_published(other.fenced, ASSET)
    other.close()


@pytest.mark.parametrize("later", [0, 5], ids=["shorter", "grown again"])
def test_a_database_from_before_is_noticed_and_vacuum_spares_the_table(lake: Lake, tmp_path: Path, later: int) -> None:
    """The queue's database is replaced by a copy in which the second batch was leased, but not published yet."""
    lake.publish(numbered(0))
    batch = lake.take()
    with sqlite3.connect(tmp_path / "fabric.db") as original, sqlite3.connect(tmp_path / "copy.db") as copy:
        original.backup(copy)
    second = lake.fenced.publish(build_output_context(asset_key=ASSET, run_id="run"), batch, numbered(1))
    assert second is not None
    table = lake.table()
    table.commit_published(lake.fenced, ASSET)
    lake.close()
    for name in ("fabric.db-wal", "fabric.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    shutil.move(tmp_path / "copy.db", tmp_path / "fabric.db")
    lake.landing._queue = None

    lake.queue.release_owner("worker")
    for n in range(later):
        lake.publish(numbered(n))
    with pytest.raises(LogMismatch, match="older copy"):
        table.commit_published(lake.fenced, ASSET)
    assert [each.lease_id for each in lake.fenced.vacuum(0, dry_run=True)] == [second.lease_id]
    assert lake.fenced.vacuum(0, keep=table.data_files) == []
    assert pairs(table) == expected(2)


def test_the_log_is_kept_for_the_table_and_can_go_once_it_is_in(lake: Lake) -> None:
    table = fill(lake, 2)
    lake.publish(numbered(2))
    lake.queue.drop_reader(READER)
    head = lake.queue.stats().head
    lake.queue.prune_events(before=head + 1)
    assert table.commit_published(lake.fenced, ASSET).batches == 1
    assert lake.queue.prune_events(before=head + 1) >= table.watermark(NAMESPACE).sequence - 1
    assert table.commit_published(lake.fenced, ASSET).batches == 0
    assert pairs(table) == expected(3)


def test_a_log_that_lost_what_is_not_in_the_table_is_an_error(lake: Lake) -> None:
    table = fill(lake, 1)
    lake.publish(numbered(1))
    lake.publish(numbered(2))
    for reader in lake.queue.readers():
        lake.queue.drop_reader(reader)
    lake.queue.prune_events(before=lake.queue.stats().head)
    with pytest.raises(EventsPruned):
        table.commit_published(lake.fenced, ASSET)


def test_files_that_are_gone_or_changed_are_named(lake: Lake) -> None:
    table = fill(lake, 1)
    gone = lake.publish(numbered(1))
    path = Path(gone.uri.removeprefix("file://"))
    content = path.read_bytes()
    for wrong, match in ((None, "is not there"), (b"", "cannot be read as parquet"), (content[:-9], "parquet")):
        path.unlink()
        if wrong is not None:
            path.write_bytes(wrong)
        with pytest.raises(FilesWrong, match=match):
            table.commit_published(lake.fenced, ASSET)
        path.touch()
    pq.write_table(numbered(1, 2), path)
    with pytest.raises(FilesWrong, match="with 3 rows and has 2 now"):
        table.commit_published(lake.fenced, ASSET)
    path.write_bytes(content)
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(2)


def test_a_batch_that_cannot_be_committed_does_not_keep_those_before_it_out(lake: Lake) -> None:
    for batch in range(5):
        lake.publish(numbered(batch))
    third = Path(lake.fenced.published(ASSET)[3].uri.removeprefix("file://"))
    content = third.read_bytes()
    third.unlink()
    table = lake.table()
    with pytest.raises(FilesWrong, match="is not there"):
        table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(3)
    third.write_bytes(content)
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(5)


def test_what_is_not_parquet_is_refused(lake: Lake) -> None:
    lake.publish([1, 2, 3])
    with pytest.raises(FilesWrong, match="made of parquet"):
        lake.table().commit_published(lake.fenced, ASSET)


# Staying small


def test_old_snapshots_and_manifests_go_and_the_data_stays(lake: Lake, tmp_path: Path) -> None:
    table = fill(lake, 30, keep_snapshots=3, properties={"commit.manifest.min-count-to-merge": "5"})
    metadata = table.load().metadata
    assert len(metadata.snapshots) == 3
    assert len(metadata.current_snapshot().manifests(table.load().io)) <= 5
    assert pairs(table) == expected(30)

    folder = tmp_path / "lake" / "lake" / "orders" / "metadata"
    assert len(metadata.metadata_log) == 20
    assert len(list(folder.glob("*.metadata.json"))) == 21  # the log's and the present one
    before = len(list(folder.glob("*.avro")))
    removed = table.tidy(older_than=0)
    assert removed
    assert len(list(folder.glob("*.avro"))) == before - sum(each.endswith(".avro") for each in removed)
    assert len(list(folder.glob("snap-*.avro"))) == 3
    assert table.tidy(older_than=0) == []
    assert pairs(table) == expected(30)
    assert lake.fenced.vacuum(0) == []
    assert len(lake.fenced.load(ASSET, pa.Table)) == 90
    lake.publish(numbered(30))
    table.commit_published(lake.fenced, ASSET)
    assert pairs(table) == expected(31)


def test_a_tag_keeps_its_snapshot(lake: Lake) -> None:
    table = fill(lake, 2, keep_snapshots=1)
    with table.load().manage_snapshots() as manage:
        manage.create_tag(table.load().current_snapshot().snapshot_id, "audit")
    for batch in (2, 3):
        lake.publish(numbered(batch))
    table.commit_published(lake.fenced, ASSET, batches_per_commit=1)
    table.tidy(older_than=0)
    tagged = table.load().snapshot_by_name("audit")
    assert pairs(table, snapshot_id=tagged.snapshot_id) == expected(2)
    assert pairs(table) == expected(4)


def test_vacuum_removes_what_was_never_published_and_nothing_that_the_table_has(lake: Lake, tmp_path: Path) -> None:
    table = fill(lake, 3)
    batch = lake.take()
    folder = tmp_path / "out" / ASSET / "_" / f"{batch.id}-{batch.leases[0].token.fence}"
    folder.mkdir()
    (folder / "part-0.parquet").write_bytes(b"zombie")
    batch.release_all()
    assert [each.lease_id for each in lake.fenced.vacuum(0, keep=table.data_files)] == [batch.id]
    assert not folder.exists()
    assert pairs(table) == expected(3)
