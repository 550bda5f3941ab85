"""Documents to Arrow rows, without Spark: every event exactly as the queue gives it, whatever range is asked for."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from lease_core import LeaseEvent, WorkItem
from lease_core.errors import EventsPruned, InvalidInput, StoreError
from omnirelay_dagster.spark import log_columns, log_reading
from omnirelay_dagster.spark.log_reading import open_log, resolve
from omnirelay_dagster.spark.log_schema import table_schema
from tests.conformance.clock import FakeClock
from tests.spark_log.conftest import Open
from tests.spark_log.histories import come_from_elsewhere, live
from tests.spark_log.rows import events_of, to_event

WHOLE = to_arrow_schema(table_schema(include_items=True), timezone="UTC")


def read(url: str, namespace: str, lowest: int, highest: int, fetch: str = "adbc", **more: Any) -> list[LeaseEvent]:
    with open_log(url, namespace, fetch) as log:
        documents = log.documents(log.head().ns, lowest, highest)
        batches = list(log_columns.to_batches(documents, namespace, lowest, highest, WHOLE, **more))
    return [to_event(row) for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fetch", ["adbc", "driver"])
def test_every_range_is_what_the_queue_says(
    open_queue: Open, url: str, clock: FakeClock, seed: int, fetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue(max_attempts=3, high_watermark=60)
    come_from_elsewhere(queue, open_queue(), clock)
    live(queue, clock, seed, steps=120)
    events = events_of(queue)
    assert len({event.type for event in events}) >= 10
    monkeypatch.setattr(log_columns, "MOST_ROWS", 37)  # batches end within entries
    monkeypatch.setattr(log_reading, "_FIRST_PAGE", 3)
    assert read(url, queue.namespace, 1, len(events), fetch) == events
    dice = random.Random(seed)
    for _ in range(12):
        lowest = dice.randint(1, len(events))
        highest = min(len(events), lowest + dice.choice([0, 1, 10, 100]))
        assert read(url, queue.namespace, lowest, highest, fetch) == events[lowest - 1 : highest]
    wanted = {"Failed", "Heartbeat"}
    assert read(url, queue.namespace, 1, len(events), fetch, types=wanted) == [e for e in events if e.type in wanted]


@pytest.mark.parametrize("columns", [["pending", "sequence_number"], ["resource_id", "type"], ["body"]])
def test_a_column_is_the_same_read_alone(open_queue: Open, url: str, clock: FakeClock, columns: list[str]) -> None:
    queue = open_queue()
    live(queue, clock, seed=5)
    head = queue.stats().head
    with open_log(url, queue.namespace) as log:
        ns = log.head().ns
        [whole] = log_columns.to_batches(log.documents(ns, 1, head), queue.namespace, 1, head, WHOLE)
        schema = to_arrow_schema(table_schema(columns=columns), timezone="UTC")
        [some] = log_columns.to_batches(log.documents(ns, 1, head), queue.namespace, 1, head, schema)
    assert some.equals(whole.select(columns))


def test_a_result_shared_by_many_does_not_fill_the_memory(
    open_queue: Open, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = open_queue()
    queue.enqueue([WorkItem("file", str(n)) for n in range(500)])
    queue.complete([lease.token for lease in queue.lease("alice", 500)], result="x" * 10_000)
    monkeypatch.setattr(log_columns, "MOST_BYTES", 200_000)
    with open_log(url, queue.namespace) as log:
        documents = log.documents(log.head().ns, 1, 1500)
        sizes = [
            (batch.num_rows, batch.nbytes)
            for batch in log_columns.to_batches(documents, queue.namespace, 1, 1500, WHOLE)
        ]
    assert sum(rows for rows, _ in sizes) == 1500
    assert max(size for _, size in sizes) < 400_000


def test_a_pruned_range_says_where_the_log_begins(open_queue: Open, url: str) -> None:
    queue = open_queue()
    for n in range(5):
        queue.enqueue([WorkItem("file", f"{n}-{m}") for m in range(10)])
    queue.prune_events(before=25)
    with open_log(url, queue.namespace) as log:
        head = log.head()
        assert head.pruned == 20
        with pytest.raises(EventsPruned, match=r"event 5 was asked for.*begins at 21.*from_sequence to 21"):
            list(log.documents(head.ns, 5, 50))
        with pytest.raises(EventsPruned, match="begins at 21"):
            list(log.documents(head.ns, 5, 20))  # all of it is gone
        assert [d.first for d in log.documents(head.ns, 25, 50)] == [21, 31, 41]
        with pytest.raises(InvalidInput, match="to_sequence: is 51, but the log ends at 50"):
            list(log.documents(head.ns, 25, 51))


def test_reading_writes_nothing_and_creates_nothing(tmp_path: Any) -> None:
    with pytest.raises(StoreError, match="no file"), open_log(f"sqlite:///{tmp_path}/none.db", "main"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.db").touch()
    for fetch in ("adbc", "driver"):
        with (
            pytest.raises(StoreError, match="no queue in sqlite"),
            open_log(f"sqlite:///{tmp_path}/empty.db", "main", fetch) as log,
        ):
            log.head()


def test_the_session_on_a_server_is_read_only(open_queue: Open, url: str) -> None:
    queue = open_queue()
    for fetch in ("adbc", "driver"):
        with (
            pytest.raises(StoreError, match=r"read-?only"),
            open_log(url, queue.namespace, fetch) as log,
        ):
            log._rows.fetch("DELETE FROM omnirelay_log WHERE ns = ? RETURNING 1", (1,))


def test_variables_are_replaced_where_the_database_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "p@ss/w:rd%")
    monkeypatch.setenv("DB_URL", "postgresql://me:secret@db/fabric")
    assert resolve("postgresql://me:${DB_PASSWORD}@db/fabric").password == "p@ss/w:rd%"
    assert resolve("${DB_URL}").host == "db"
    with pytest.raises(InvalidInput, match=r"variable DB_NONE is not set.*spark\.executorEnv\.DB_NONE"):
        resolve("postgresql://me:${DB_NONE}@db/fabric")


@pytest.mark.parametrize("fetch", ["adbc", "driver"])
@pytest.mark.parametrize(
    "form", ["postgresql://me:hunter2@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db?password=hunter2"]
)
def test_the_password_is_in_no_error(form: str, fetch: str) -> None:
    with pytest.raises(StoreError) as failure, open_log(form, "main", fetch):
        pass
    assert "hunter2" not in str(failure.value)
    assert failure.value.__suppress_context__
