"""The source in Spark: ranges, partitions, streams, filters, errors, and no password anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, WorkItem
from tests.conformance.clock import FakeClock
from tests.spark_log.conftest import Open
from tests.spark_log.histories import come_from_elsewhere, live
from tests.spark_log.rows import events_of, to_event


def reader(spark: Any, url: str, queue: LeaseQueue, **options: Any) -> Any:
    plan = spark.read.format("omnirelay_log").option("url", url).option("namespace", queue.namespace)
    return plan.options(**options)


def events_in(frame: Any) -> list[Any]:
    return [to_event(row.asDict(recursive=True)) for row in frame.orderBy("sequence_number").collect()]


def test_what_spark_reads_is_what_the_queue_says(spark: Any, open_queue: Open, url: str, clock: FakeClock) -> None:
    queue = open_queue(max_attempts=3)
    come_from_elsewhere(queue, open_queue(), clock)
    live(queue, clock, seed=21, steps=80)
    events = events_of(queue)
    size = len(events) // 3 + 1
    frame = reader(spark, url, queue, include_items=True, partition_size=size).load()
    assert frame.rdd.getNumPartitions() == 3
    assert events_in(frame) == events
    part = reader(spark, url, queue, include_items=True, from_sequence=7, to_sequence=len(events) - 5).load()
    assert events_in(part) == events[6:-5]


@pytest.mark.parametrize("url", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_filters_narrow_what_is_read(spark: Any, open_queue: Open, url: str, clock: FakeClock) -> None:
    queue = open_queue()
    live(queue, clock, seed=22, steps=60)
    events = events_of(queue)
    moment = events[len(events) // 2].timestamp
    frame = reader(spark, url, queue, columns="type, sequence_number, timestamp", partition_size=60).load()
    assert frame.columns == ["type", "sequence_number", "timestamp"]
    late = frame.where(f"sequence_number > 40 AND type IN ('LeaseGranted', 'Enqueued') AND timestamp >= '{moment}'")
    assert sorted(row.sequence_number for row in late.collect()) == [
        e.sequence_number
        for e in events
        if e.sequence_number > 40 and e.type in ("LeaseGranted", "Enqueued") and e.timestamp >= moment
    ]
    few = frame.where("sequence_number BETWEEN 21 AND 110")
    assert few.rdd.getNumPartitions() == 2
    assert few.count() == 90
    assert frame.where("sequence_number > 1000000000").count() == 0


@pytest.fixture
def pruned(tmp_path: Path) -> Any:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with LeaseQueue.open(url, "main") as queue:
        for n in range(6):
            queue.enqueue([WorkItem("file", f"{n}-{m}") for m in range(10)])
        queue.prune_events(before=25)
        yield queue, url


def said(frame: Any) -> str:
    with pytest.raises(Exception) as failure:  # noqa: PT011
        frame.count()
    return str(failure.value)


def test_a_read_that_cannot_be_says_why(spark: Any, pruned: Any) -> None:
    queue, url = pruned
    assert "the log was pruned and begins at 21" in said(reader(spark, url, queue).load())
    assert reader(spark, url, queue, from_sequence="earliest").load().count() == 40
    assert "the log ends at 60" in said(reader(spark, url, queue, from_sequence=21, to_sequence=61).load())
    assert reader(spark, url, queue, from_sequence=61).load().count() == 0
    for options, complaint in {
        ("from_sequence", "soon"): "from_sequence: is 'soon'; use a whole number",
        ("nonsense", "1"): "nonsense: is not an option of omnirelay_log",
        ("columns", "type,colour"): "there is no column 'colour'",
    }.items():
        with pytest.raises(Exception, match=complaint):
            reader(spark, url, queue, **dict([options])).load().count()


@pytest.mark.parametrize("url", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_a_stream_reads_each_event_once_through_restarts(
    spark: Any, open_queue: Open, url: str, clock: FakeClock, tmp_path: Path
) -> None:
    queue = open_queue()
    live(queue, clock, seed=23, steps=40)
    sizes: list[int] = []
    seen: list[int] = []

    def take(frame: Any, _batch: int) -> None:
        numbers = [row.sequence_number for row in frame.select("sequence_number").collect()]
        sizes.append(len(numbers))
        seen.extend(numbers)

    def run() -> None:
        stream = (
            spark.readStream.format("omnirelay_log")
            .options(url=url, namespace=queue.namespace, max_events_per_trigger=70, partition_size=40)
            .load()
        )
        query = (
            stream.writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert query.lastProgress is None or str(url.partition("@")[0].rpartition(":")[2]) not in str(
            query.lastProgress
        )

    run()
    first = queue.stats().head
    assert sorted(seen) == list(range(1, first + 1))
    assert max(sizes) == 70
    queue.enqueue([WorkItem("file", str(n)) for n in range(5)])
    run()
    assert sorted(seen) == list(range(1, first + 6))


def test_a_stream_whose_place_was_pruned_says_so(spark: Any, pruned: Any, tmp_path: Path) -> None:
    queue, url = pruned
    stream = spark.readStream.format("omnirelay_log").options(url=url, namespace=queue.namespace).load()
    with pytest.raises(Exception, match="begins at 21"):
        stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).trigger(
            availableNow=True
        ).start().awaitTermination()


def test_the_password_is_in_no_plan_and_no_error(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:hunter2@127.0.0.1:1/db"
    frame = spark.read.format("omnirelay_log").option("url", url).load()
    shown = [frame._jdf.queryExecution().logical().toString(), frame._jdf.queryExecution().analyzed().toString()]
    shown += [frame._jdf.queryExecution().analyzed().toJSON(), said(frame), str(frame)]
    assert not any("hunter2" in text for text in shown)
    assert "could not be read" in shown[3]
