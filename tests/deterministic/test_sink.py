"""Sinks that apply each event once: delivered again, in parts, by two at a time, and across kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from lease_core import LeaseEvent, LeaseQueue, WorkItem
from lease_core.deterministic import DeterministicSink, EffectStore, RecordConflict, StateStore, TransactionalSink
from lease_core.errors import InvalidInput
from lease_core.replication import MemoryCheckpoints, Relay
from tests.deterministic import workers
from tests.kills.forks import KILLED, start


@pytest.fixture
def queue(name: str) -> Iterator[LeaseQueue]:
    with LeaseQueue.open("sqlite://", name) as queue:
        queue.enqueue([WorkItem("file", str(n)) for n in range(4)])
        queue.complete(queue.lease("worker", 4))
        yield queue


def test_every_event_is_applied_once_in_order(queue: LeaseQueue, effects: EffectStore) -> None:
    applied: list[LeaseEvent] = []
    events = queue.events()
    sink = DeterministicSink(applied.append, effects)
    sink.deliver(events[:5])
    sink.deliver(events[3:])
    sink.deliver(events)
    DeterministicSink(applied.append, effects).deliver(events)
    assert applied == events
    assert len(events) == 12


def test_ids_are_made_of_change_and_sequence_number(queue: LeaseQueue, effects: EffectStore, name: str) -> None:
    event = queue.events()[2]
    assert DeterministicSink(print, effects).effect_id(event) == f"deterministic/{name}/seq/3"
    assert DeterministicSink(print, effects, name="copy").effect_id(event) == f"copy/{name}/seq/3"
    assert DeterministicSink(print, effects, change_id="orders").effect_id(event) == "orders/seq/3"
    own = DeterministicSink(print, effects, effect_id=lambda event: f"{event.type}-{event.sequence_number}")
    assert own.effect_id(event) == "Enqueued-3"
    with pytest.raises(InvalidInput, match="name"):
        DeterministicSink(print, effects, name="")


def test_what_failed_is_applied_again_and_what_was_before_it_is_not(queue: LeaseQueue, effects: EffectStore) -> None:
    applied: list[int] = []
    broken = {4}

    def handler(event: LeaseEvent) -> object:
        if event.sequence_number in broken:
            raise ConnectionError("the other side is down")
        applied.append(event.sequence_number)
        return object()  # what a handler returns is its own business

    sink = DeterministicSink(handler, effects)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sink.deliver(queue.events())
    assert applied == [1, 2, 3]
    broken.clear()
    sink.deliver(queue.events())
    assert applied == list(range(1, 13))


def test_two_logs_under_one_change_id_do_not_hide_each_other(effects: EffectStore, name: str) -> None:
    sink = DeterministicSink(lambda _: None, effects, change_id=name)
    with LeaseQueue.open("sqlite://", "one") as one, LeaseQueue.open("sqlite://", "two") as two:
        for queue in (one, two):
            queue.enqueue(WorkItem("file", "a"))
        sink.deliver(one.events())
        with pytest.raises(RecordConflict, match="one#1"):
            sink.deliver(two.events())
        DeterministicSink(lambda _: None, effects, name=name).deliver([*one.events(), *two.events()])


# Effect and record in one transaction


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    url = f"sqlite:///{tmp_path / 'sink.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE applied (n BIGINT)"))
    yield engine
    engine.dispose()


def insert(event: LeaseEvent, connection: sa.Connection) -> None:
    connection.execute(sa.text("INSERT INTO applied VALUES (:n)"), {"n": event.sequence_number})


def applied(engine: sa.Engine) -> Counter[int]:
    with engine.connect() as connection:
        return Counter(connection.execute(sa.text("SELECT n FROM applied")).scalars())


def once(numbers: range) -> Counter[int]:
    return Counter(dict.fromkeys(numbers, 1))


def test_a_delivery_is_applied_whole_or_not_at_all(database: sa.Engine, queue: LeaseQueue) -> None:
    broken = {7}

    def handler(event: LeaseEvent, connection: sa.Connection) -> None:
        insert(event, connection)
        if event.sequence_number in broken:
            raise ConnectionError

    with StateStore.open(database.url.render_as_string(False)) as store:
        sink = TransactionalSink(handler, EffectStore(store), database)
        sink.deliver(queue.events(limit=5))
        with pytest.raises(ConnectionError):
            sink.deliver(queue.events())
        assert applied(database) == once(range(1, 6))
        broken.clear()
        sink.deliver(queue.events())
        sink.deliver(queue.events())
    assert applied(database) == once(range(1, 13))
    assert sink.name == "transactional"


@pytest.mark.parametrize(("fatal", "when"), [(1, "handler"), (5, "handler"), (12, "handler"), (0, "commit")])
def test_kills_neither_lose_nor_double_an_event(database: sa.Engine, name: str, fatal: int, when: str) -> None:
    url = database.url.render_as_string(False)
    with LeaseQueue.open(url, name, auto_migrate=True) as queue:
        queue.enqueue([WorkItem("file", str(n)) for n in range(12)])
        events = queue.events()
    with StateStore.open(url) as store:
        sink = TransactionalSink(insert, EffectStore(store), database, change_id=name)
        sink.deliver(events[:3])
        process = start(workers.apply_and_die, url, name, name, max(fatal, 4), when)
        process.join(30)
        assert process.exitcode == KILLED
        assert applied(database) == once(range(1, 4))
        sink.deliver(events)
    assert applied(database) == once(range(1, 13))


def test_two_sinks_at_once_apply_an_event_once(database: sa.Engine, queue: LeaseQueue) -> None:
    """The second has run the handler when the first one commits: it must undo what it did."""
    [event] = queue.events(limit=1)
    with StateStore.open(database.url.render_as_string(False)) as store:
        effects = EffectStore(store)

        def overtaken(event: LeaseEvent, connection: sa.Connection) -> None:
            if not seen:
                seen.append(event)
                TransactionalSink(insert, effects, database, change_id="c").deliver([event])
            insert(event, connection)

        seen: list[Any] = []
        sink = TransactionalSink(overtaken, effects, database, change_id="c")
        with pytest.raises(RecordConflict, match="roll back"):
            sink.deliver([event])
        sink.deliver([event])
    assert applied(database) == once(range(1, 2))


def test_a_relay_delivers_to_it(tmp_path: Path) -> None:
    applied: list[LeaseEvent] = []
    effects = EffectStore(StateStore.open(f"file://{tmp_path}/effects"))
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.enqueue([WorkItem("file", str(n)) for n in range(10)])
        Relay(queue, DeterministicSink(applied.append, effects)).run_once()
        Relay(queue, DeterministicSink(applied.append, effects), checkpoints=MemoryCheckpoints()).run_once()
        assert applied == queue.events()
