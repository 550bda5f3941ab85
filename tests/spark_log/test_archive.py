"""The source over a log that was pruned and its archive: readers cross from one to the other without noticing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.replication import HistoryDiffers, ObjectStoreSink, Relay, Rules, prune_archived, read_segments
from omnirelay_dagster.spark.log_archive import Archive, ArchivedLog
from omnirelay_dagster.spark.log_reading import open_log
from tests.conformance.clock import FakeClock
from tests.spark_log.conftest import Open
from tests.spark_log.histories import come_from_elsewhere, live
from tests.spark_log.rows import events_of
from tests.spark_log.test_source import events_in, reader, said


def archive(queue: LeaseQueue, folder: Path, batch_size: int = 50) -> str:
    """Copy the log so far to segments. Gives their address."""
    Relay(queue, ObjectStoreSink(folder.as_uri()), rules=Rules(batch_size=batch_size, linger=0)).run_once()
    return folder.as_uri()


def prune(queue: LeaseQueue, url: str) -> int:
    gone = prune_archived(queue, read_segments(url, queue.namespace))
    assert gone > 0
    return gone


@pytest.mark.parametrize("url", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_what_was_pruned_is_read_from_the_archive(
    spark: Any, open_queue: Open, url: str, clock: FakeClock, tmp_path: Path
) -> None:
    queue = open_queue(max_attempts=3)
    come_from_elsewhere(queue, open_queue(), clock)
    live(queue, clock, seed=31, steps=60)
    copy = archive(queue, tmp_path / "archive")
    archived = queue.stats().head
    live(queue, clock, seed=32, steps=30)
    events = events_of(queue)
    assert len(events) > archived == prune(queue, copy)

    frame = reader(spark, url, queue, include_items=True, archive=copy, partition_size=archived // 2 + 1).load()
    assert frame.rdd.getNumPartitions() >= 2
    assert events_in(frame) == events  # the second partition crosses from the archive to what is left
    earliest = reader(spark, url, queue, archive=copy, from_sequence="earliest", columns="sequence_number")
    assert earliest.load().count() == len(events)
    moment = events[archived // 2].timestamp
    late = frame.where(f"timestamp >= '{moment}' AND type = 'LeaseGranted' AND sequence_number < {archived + 5}")
    assert [event.sequence_number for event in events_in(late)] == [
        e.sequence_number for e in events[: archived + 4] if e.timestamp >= moment and e.type == "LeaseGranted"
    ]


def test_a_stream_goes_on_where_its_place_was_pruned(spark: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    seen: list[int] = []

    def run() -> None:
        options = {"url": url, "namespace": "main", "archive": (tmp_path / "archive").as_uri()}
        stream = spark.readStream.format("omnirelay_log").options(**options, max_events_per_trigger=20).load()
        stream.writeStream.foreachBatch(
            lambda frame, _: seen.extend(row.sequence_number for row in frame.select("sequence_number").collect())
        ).option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination()

    with LeaseQueue.open(url, "main") as queue:
        (tmp_path / "archive").mkdir()
        queue.enqueue([WorkItem("file", f"a-{n}") for n in range(30)])
        run()
        for n in range(3):
            queue.enqueue([WorkItem("file", f"b-{n}-{m}") for m in range(15)])
        assert prune(queue, archive(queue, tmp_path / "archive")) == 75
        queue.enqueue([WorkItem("file", "late")])
        run()
    assert sorted(seen) == list(range(1, 77))


@pytest.fixture
def pruned(tmp_path: Path) -> Any:
    """Sixty events in six transactions; twenty of them in the archive, forty pruned."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with LeaseQueue.open(url, "main") as queue:
        queue.enqueue([WorkItem("file", f"first-{m}") for m in range(20)])
        copy = archive(queue, tmp_path / "archive", 10)
        queue.drop_reader("relay/objects")
        for n in range(4):
            queue.enqueue([WorkItem("file", f"{n}-{m}") for m in range(10)])
        queue.prune_events(before=41)
        yield queue, url, copy


def test_what_neither_has_is_an_error_and_no_gap(spark: Any, pruned: Any, tmp_path: Path) -> None:
    queue, url, copy = pruned
    assert reader(spark, url, queue, archive=copy, to_sequence=20).load().count() == 20
    assert "event 21 was asked for" in said(reader(spark, url, queue, archive=copy).load())
    [first, second] = sorted((tmp_path / "archive" / "main").iterdir())
    second.write_bytes(second.read_bytes().replace(b"first-15", b"first-51"))
    assert "is cut off or damaged" in said(reader(spark, url, queue, archive=copy, to_sequence=20).load())
    first.unlink()
    assert "begins at 11" in said(reader(spark, url, queue, archive=copy, to_sequence=20).load())
    assert "there is no folder" in said(reader(spark, url, queue, archive="file:///nowhere/at-all").load())
    assert "archive: the environment variable NO_SUCH" in said(reader(spark, url, queue, archive="${NO_SUCH}").load())


def test_pruning_may_overtake_a_read(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with LeaseQueue.open(url, "main") as queue:
        for n in range(60):
            queue.enqueue([WorkItem("file", f"{n}-{m}") for m in range(3)])
        copy = archive(queue, tmp_path / "archive", 30)
        with open_log(url, "main") as log:
            both = ArchivedLog(log, Archive(copy, "main"))
            ns = both.head().ns
            numbers: list[int] = []
            for document in both.documents(ns, 5, 170):
                numbers += range(max(document.first, 5), min(document.last, 170) + 1)
                if document.last == 6:
                    assert prune(queue, copy) == 180
    assert numbers == list(range(5, 171))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_archive_of_another_queue_is_refused(overlap: bool, tmp_path: Path) -> None:
    """Two queues of one name: told apart by the event where they meet, or by what the segments say."""
    urls = [f"sqlite:///{tmp_path / name}.db" for name in ("queue", "stranger")]
    for url in urls:
        with LeaseQueue.open(url, "main") as queue:
            for n in range(10):
                queue.enqueue([WorkItem("file", f"{n}-{m}") for m in range(10)])
    with LeaseQueue.open(urls[1], "main") as stranger:
        copy = archive(stranger, tmp_path / "archive")
    with LeaseQueue.open(urls[0], "main") as queue:
        queue.prune_events(before=51 if overlap else 101)
        queue.enqueue([WorkItem("file", f"late-{m}") for m in range(10)])
    with open_log(urls[0], "main") as log:
        both = ArchivedLog(log, Archive(copy, "main"))
        said = "another event 51 than the log" if overlap else "begun for another queue"
        with pytest.raises(HistoryDiffers, match=said):
            list(both.documents(both.head().ns, 1, 110))
