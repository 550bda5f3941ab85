"""``enqueue(connection=...)`` is part of the caller's own transaction: it happens, or doesn't, with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from lease_core import BackpressureActive, LeaseQueue, QueueConfig, Receipt
from lease_core.errors import InvalidInput
from tests.conformance.backends import Backend, Postgres, SqliteFile
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import names, nothing_changes, types, work, works

pytestmark = pytest.mark.usefixtures("shared_backend")


@pytest.fixture
def engine(backend: Backend) -> Iterator[sa.Engine]:
    engine = backend.engine()
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE IF NOT EXISTS landed (name TEXT)"))
        connection.execute(sa.text("DELETE FROM landed"))
    yield engine
    engine.dispose()


def landed(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return [row[0] for row in connection.execute(sa.text("SELECT name FROM landed ORDER BY name"))]


def land(connection: sa.Connection, name: str) -> None:
    connection.execute(sa.text("INSERT INTO landed VALUES (:name)"), {"name": name})


def test_the_callers_rows_and_the_items_commit_together(queue: LeaseQueue, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        land(connection, "a")
        assert queue.enqueue(works(2), connection=connection) == [Receipt(1), Receipt(2)]
    assert landed(engine) == ["a"]
    assert names(queue.lease("worker", 9)) == ["1", "2"]
    assert types(queue) == ["Enqueued"] * 2 + ["LeaseGranted"] * 2


def test_the_callers_rows_and_the_items_roll_back_together(queue: LeaseQueue, engine: sa.Engine) -> None:
    with nothing_changes(queue), engine.connect() as connection:
        land(connection, "a")
        queue.enqueue(works(2), connection=connection)
        connection.rollback()
    assert landed(engine) == []
    assert queue.enqueue(work("next")) == [Receipt(1)]


def test_an_exception_in_the_callers_transaction_takes_the_items_with_it(queue: LeaseQueue, engine: sa.Engine) -> None:
    with nothing_changes(queue), suppress(ZeroDivisionError), engine.begin() as connection:
        queue.enqueue(work(), connection=connection)
        _ = 1 / 0


def test_until_the_commit_nobody_else_sees_anything(queue: LeaseQueue, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        with nothing_changes(queue):
            queue.enqueue(work(), connection=connection)
        connection.commit()
    assert queue.stats().pending == 1


@pytest.mark.parametrize("first", ["enqueue", "own statement"])
def test_a_connection_that_began_by_itself_commits_the_items(queue: LeaseQueue, engine: sa.Engine, first: str) -> None:
    with engine.connect() as connection:
        if first == "own statement":
            land(connection, "a")
        queue.enqueue(work(), connection=connection)
        connection.commit()
    assert queue.stats().pending == 1


def test_several_enqueues_may_share_a_transaction(queue: LeaseQueue, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue(work(request_id="r"), connection=connection)
        land(connection, "between")
        receipts = queue.enqueue([work(request_id="r"), work("b")], connection=connection)
    assert receipts == [Receipt(1, duplicate=True), Receipt(2)]
    assert [event.sequence_number for event in queue.events()] == [1, 2]


def test_two_queues_may_share_a_transaction(open_queue: OpenQueue, engine: sa.Engine) -> None:
    first, second = open_queue("first"), open_queue("second")
    with engine.begin() as connection:
        first.enqueue(work(), connection=connection)
        second.enqueue(works(2), connection=connection)
    assert (first.stats().pending, second.stats().pending) == (1, 2)


def test_a_savepoint_rolls_back_only_its_own_items(queue: LeaseQueue, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        queue.enqueue(work("kept"), connection=connection)
        savepoint = connection.begin_nested()
        queue.enqueue(work("undone"), connection=connection)
        savepoint.rollback()
        queue.enqueue(work("kept too"), connection=connection)
    assert names(queue.lease("worker", 9)) == ["kept", "kept too"]
    assert [event.sequence_number for event in queue.events()] == [1, 2, 3, 4]


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "rollback"])
def test_the_drivers_own_connection_will_do(backend: Backend, queue: LeaseQueue, commit: bool) -> None:
    with closing(backend.driver_connection()) as connection:
        queue.enqueue(works(2), connection=connection)
        assert queue.stats().pending == 0
        connection.commit() if commit else connection.rollback()
    assert queue.stats().pending == (2 if commit else 0)


def test_the_callers_way_of_reading_rows_does_not_matter(backend: Backend, queue: LeaseQueue) -> None:
    with closing(backend.driver_connection()) as connection:
        connection.row_factory = _rows_as_dicts(backend)
        queue.enqueue(work(request_id="r"), connection=connection)
        assert queue.enqueue(work(request_id="r"), connection=connection) == [Receipt(1, duplicate=True)]
        connection.commit()
    assert queue.stats().pending == 1


def _rows_as_dicts(backend: Backend) -> Any:
    if isinstance(backend, Postgres):
        from psycopg.rows import dict_row

        return dict_row
    return lambda cursor, row: {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def test_the_callers_connection_is_left_as_it_was(backend: Backend, queue: LeaseQueue) -> None:
    with closing(backend.driver_connection()) as connection:
        queue.enqueue(work(), connection=connection)
        connection.commit()
        [value] = connection.execute("SELECT 1").fetchone()
        connection.commit()
    assert value == 1


def test_backpressure_is_raised_at_once_and_the_transaction_goes_on(open_queue: OpenQueue, engine: sa.Engine) -> None:
    queue = open_queue(high_watermark=2)
    with engine.begin() as connection:
        land(connection, "a")
        queue.enqueue(works(2), connection=connection)
        with pytest.raises(BackpressureActive):
            queue.enqueue(work(), connection=connection)
        land(connection, "b")
    assert landed(engine) == ["a", "b"]
    assert types(queue) == ["Enqueued", "Enqueued", "BackpressureChanged"]


def test_bad_items_leave_the_transaction_usable(queue: LeaseQueue, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        with pytest.raises(InvalidInput):
            queue.enqueue([work("good"), work("")], connection=connection)
        land(connection, "a")
    assert landed(engine) == ["a"]
    assert queue.stats().pending == 0


def test_whoever_waited_for_the_transaction_goes_by_the_time_after_it(open_queue: OpenQueue, engine: sa.Engine) -> None:
    """A lease that lasted from before the wait could be over before its holder hears of it."""
    queue = open_queue(clock=None)
    queue.enqueue(work())
    with ThreadPoolExecutor(1) as pool, engine.connect() as connection:
        queue.enqueue(work(), connection=connection)
        waiting = pool.submit(queue.lease, "worker", duration=0.4)
        time.sleep(0.5)
        ended = datetime.now(UTC)
        connection.rollback()
        [lease] = waiting.result(timeout=10)
    assert lease.granted_at >= ended - timedelta(milliseconds=50)


def test_waiting_inside_of_a_transaction_is_refused(queue: LeaseQueue, engine: sa.Engine) -> None:
    with engine.begin() as connection, pytest.raises(InvalidInput, match="wait"):
        queue.enqueue(work(), wait=1, connection=connection)


def test_exclusivity_holds_for_items_that_came_in_a_transaction(open_queue: OpenQueue, engine: sa.Engine) -> None:
    queue = open_queue(exclusive="resource")
    with engine.begin() as connection:
        queue.enqueue([work("a"), work("a"), work("b")], connection=connection)
    assert names(queue.lease("worker", 9)) == ["a", "b"]


def test_a_connection_to_another_database_is_refused(
    backend: Backend, queue: LeaseQueue, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It has tables of the same names, and a queue of the same number: nothing but the queue's id tells them apart."""
    if isinstance(backend, SqliteFile):
        elsewhere: Backend = SqliteFile(tmp_path / "elsewhere.db")
        other = elsewhere.open(queue.namespace, QueueConfig(), None)
    else:
        elsewhere = Postgres(request.getfixturevalue("postgres_url"))
        LeaseQueue.migrate(elsewhere.url)
        other = elsewhere.open(queue.namespace, QueueConfig(), None)
        with closing(elsewhere.driver_connection()) as connection:
            connection.execute("UPDATE omnirelay_head SET ns = %s", (queue._ns,))
            connection.commit()
    with other, closing(elsewhere.driver_connection()) as connection:
        with nothing_changes(queue), pytest.raises(InvalidInput, match="connection"):
            queue.enqueue(work(), connection=connection)
        connection.commit()
    with elsewhere.open(queue.namespace, QueueConfig(), None) as other:
        assert other.stats().head == 0
