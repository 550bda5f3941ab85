"""PostgreSQL goes away and comes back: between calls, under a sleeper, in the middle of an operation, at the commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import psycopg
import pytest
import sqlalchemy as sa

from lease_core import LeaseError, LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import StoreUnavailable
from tests.environment.proxy import Line, Proxy
from tests.kills import audit
from tests.servers.postgres import PostgresServer

ITEMS = [WorkItem("file", name) for name in ("a", "b", "c")]  # no request_id: nothing but the queue keeps them single


@contextmanager
def direct(url: str) -> Iterator[psycopg.Connection]:
    conninfo = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(conninfo, autocommit=True) as connection:
        yield connection


def terminate_all(url: str) -> int:
    """Kill every other connection to the database."""
    with direct(url) as connection:
        killed = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        ).fetchall()
        while connection.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        ).fetchall():
            time.sleep(0.01)
    return len(killed)


def warm_up(queue: LeaseQueue, connections: int = 6) -> None:
    """Fill the pool."""
    together = threading.Barrier(connections)

    def hold_one(_: int) -> None:
        pooled = queue._store.engine.raw_connection()
        together.wait()
        pooled.close()

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(hold_one, range(connections)))


def cycle(queue: LeaseQueue) -> None:
    """One item through the whole queue."""
    queue.enqueue(ITEMS[0])
    [lease] = queue.lease("worker")
    queue.heartbeat(lease).raise_if_refused()
    queue.complete(lease).raise_if_refused()


def test_the_server_restarts_between_calls(own_server: PostgresServer, restartable_url: str) -> None:
    with LeaseQueue.open(restartable_url) as queue:
        cycle(queue)
        warm_up(queue)
        own_server.restart()
        cycle(queue)
        own_server.kill()
        own_server.start()
        assert queue.stats().completed == 2
        cycle(queue)
        audit.check_queue(queue)


OPERATIONS: dict[str, Callable[[LeaseQueue], object]] = {
    "enqueue": lambda queue: queue.enqueue(ITEMS),
    "lease": lambda queue: queue.lease("worker"),
    "stats": lambda queue: queue.stats(),
    "events": lambda queue: queue.events(),
    "sweep": lambda queue: queue.sweep(),
    "drain": lambda queue: queue.drain(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_pools_connections_die_between_calls(name: str, migrated_postgres_url: str) -> None:
    with LeaseQueue.open(migrated_postgres_url) as queue:
        cycle(queue)
        warm_up(queue)
        assert terminate_all(migrated_postgres_url) >= 6
        OPERATIONS[name](queue)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_stays_away_is_one_clear_error(
    name: str, own_server: PostgresServer, restartable_url: str
) -> None:
    with LeaseQueue.open(restartable_url, config=QueueConfig(store_timeout=0.5)) as queue:
        cycle(queue)
        own_server.stop()
        try:
            started = time.monotonic()
            with pytest.raises(StoreUnavailable) as failure:
                OPERATIONS[name](queue)
            assert time.monotonic() - started < 10
            assert "repeat" in str(failure.value)
        finally:
            own_server.start()
        cycle(queue)


def test_opening_without_a_server(own_server: PostgresServer, restartable_url: str) -> None:
    own_server.stop()
    try:
        with pytest.raises(StoreUnavailable):
            LeaseQueue.open(restartable_url, config=QueueConfig(store_timeout=0.5))
    finally:
        own_server.start()


def test_the_server_restarts_under_a_sleeper(own_server: PostgresServer, restartable_url: str) -> None:
    with LeaseQueue.open(restartable_url) as sleeper, ThreadPoolExecutor(2) as pool:
        leasing = pool.submit(sleeper.lease, "worker", wait=60)
        time.sleep(0.5)
        own_server.restart()
        time.sleep(0.5)
        assert not leasing.done(), "waiting goes on"
        with LeaseQueue.open(restartable_url) as other:
            other.enqueue(ITEMS[0])
        asked = time.monotonic()
        assert len(leasing.result(timeout=60)) == 1
        assert time.monotonic() - asked < 10, "the sleeper did not hear of the work"


def test_work_that_arrives_while_the_sleepers_line_is_down_is_found(proxy: Proxy, migrated_postgres_url: str) -> None:
    """The sleeper's line dies, work arrives, the line comes back: nobody will notify the sleeper again."""
    with (
        LeaseQueue.open(proxy.url) as sleeper,
        LeaseQueue.open(migrated_postgres_url) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        leasing = pool.submit(sleeper.lease, "worker", wait=60)
        time.sleep(0.5)
        proxy.freeze()
        proxy.cut_all()
        other.enqueue(ITEMS[0])
        proxy.thaw()
        asked = time.monotonic()
        assert len(leasing.result(timeout=60)) == 1
        assert time.monotonic() - asked < 10, "the sleeper did not look again"


# Backends killed in the middle of an operation


@pytest.mark.parametrize("point", ["locked", "half-written", "before-commit"])
def test_a_connection_killed_in_the_middle_of_an_operation(point: str, migrated_postgres_url: str) -> None:
    with LeaseQueue.open(migrated_postgres_url) as queue:
        cycle(queue)
        kills = []

        def kill_once(reached: str) -> None:
            if reached == point and not kills:
                kills.append(terminate_all(migrated_postgres_url))

        for operation in (
            lambda: queue.enqueue(ITEMS),
            lambda: queue.lease("worker", limit=3),
            lambda: queue.complete(queue.leases()),
        ):
            kills.clear()
            queue._store.probe = kill_once
            operation()
            assert kills, "nothing was killed"
            queue._store.probe = None
        events = [event.type for event in audit.check_queue(queue)]
        assert events[4:] == ["Enqueued"] * 3 + ["LeaseGranted"] * 3 + ["Completed"] * 3


# The commit in doubt: the line dies around COMMIT, and only the database knows what became of it


Fault = Callable[[Line, bytes], None]


def drop_the_commit(line: Line, data: bytes) -> None:
    """The server never hears of it."""
    line.cut()


def cut_at_once(line: Line, data: bytes) -> None:
    """The commit is sent, and the line is gone: either may come to be."""
    line.server.sendall(data)
    line.cut()


def deliver_late(line: Line, data: bytes, after: float = 1.0) -> None:
    """The client's end is gone long before the server gets to see the commit."""
    line.cut_client()
    time.sleep(after)
    line.server.sendall(data)


def drop_the_answer(line: Line, data: bytes) -> None:
    """The server commits, and says so to nobody."""
    line.cut()


@contextmanager
def at_the_commit(proxy: Proxy, fault: Fault) -> Iterator[None]:
    """Let ``fault`` happen to the next COMMIT, once, and make sure that it did."""
    hit = threading.Event()

    def watch(line: Line, data: bytes) -> bool:
        if b"COMMIT\0" not in data or hit.is_set():
            return False
        hit.set()
        fault(line, data)
        return True

    proxy.cut_all()  # a new connection sends the statement's text, an old one may just name it
    if fault is drop_the_answer:
        proxy.on_answer = watch
    else:
        proxy.on_request = watch
    yield
    assert hit.is_set(), "no commit came by"
    proxy.behave()


@pytest.mark.parametrize("fault", [drop_the_commit, drop_the_answer, cut_at_once, deliver_late])
def test_a_commit_in_doubt_is_settled_to_exactly_once(fault: Fault, proxy: Proxy, migrated_postgres_url: str) -> None:
    with LeaseQueue.open(proxy.url) as queue, LeaseQueue.open(migrated_postgres_url) as witness:
        with at_the_commit(proxy, fault):
            receipts = queue.enqueue(ITEMS)
        assert [receipt.sequence_id for receipt in receipts] == [1, 2, 3]
        assert not any(receipt.duplicate for receipt in receipts)
        with at_the_commit(proxy, fault):
            leases = queue.lease("worker", limit=3)
        assert [lease.item.resource_id for lease in leases] == ["a", "b", "c"]
        with at_the_commit(proxy, fault):
            assert len(queue.fail(leases[0], "no luck", delay=0).accepted) == 1
        with at_the_commit(proxy, fault):
            assert len(queue.complete(leases[1:], atomic=True).accepted) == 2
        with at_the_commit(proxy, fault):
            assert [each.item.resource_id for each in queue.drain()] == ["a"]
        events = [event.type for event in witness.events()]
        assert events == ["Enqueued"] * 3 + ["LeaseGranted"] * 3 + ["Failed"] + ["Completed"] * 2 + ["Drained"]
        stats = witness.stats()
        assert (stats.pending, stats.active, stats.completed, stats.head) == (0, 0, 2, len(events))


def test_a_commit_in_doubt_with_other_writers_around(proxy: Proxy, migrated_postgres_url: str) -> None:
    """Others take the numbers after, or in place of, the lost commit; it must not be taken for one of theirs."""
    done = threading.Event()

    def others() -> int:
        with LeaseQueue.open(migrated_postgres_url) as queue:
            count = 0
            while not done.is_set():
                queue.enqueue(WorkItem("file", f"other/{count}"))
                count += 1
            return count

    with LeaseQueue.open(proxy.url) as queue, ThreadPoolExecutor(2) as pool:
        noise = [pool.submit(others) for _ in range(2)]
        mine = 0
        try:
            for fault in (drop_the_commit, drop_the_answer, cut_at_once) * 10:
                with at_the_commit(proxy, fault):
                    receipts = queue.enqueue([WorkItem("mine", str(mine)), WorkItem("mine", str(mine + 1))])
                for receipt in receipts:
                    [status] = queue.inspect(receipt.sequence_id)
                    assert (status.item.resource_type, status.item.resource_id) == ("mine", str(mine))
                    mine += 1
        finally:
            done.set()
        rest = sum(each.result() for each in noise)
        events = audit.check_queue(queue)
        names = [event.item.resource_id for event in events if event.item and event.item.resource_type == "mine"]
        assert names == [str(n) for n in range(mine)]
        assert len(events) == mine + rest


def test_a_commit_that_stays_in_doubt_says_so(proxy: Proxy, migrated_postgres_url: str) -> None:
    """The database does not come back in time to ask. It happened all the same, so the caller must not be told that
    nothing was written."""
    with (
        LeaseQueue.open(proxy.url, config=QueueConfig(store_timeout=1)) as queue,
        LeaseQueue.open(migrated_postgres_url) as witness,
    ):

        def go_silent(line: Line, data: bytes) -> None:
            proxy.freeze()  # first: the answer must not slip through
            line.server.sendall(data)
            line.cut()

        with at_the_commit(proxy, go_silent), pytest.raises(StoreUnavailable, match="request_id"):
            queue.enqueue(ITEMS)
        proxy.thaw()
        assert witness.stats().pending == 3


def test_a_commit_still_on_its_way_when_time_is_up_says_so(proxy: Proxy, migrated_postgres_url: str) -> None:
    """The commit sits in the network and its transaction holds the lock; when the caller gives up, and is told so,
    it may still come to be."""
    with (
        LeaseQueue.open(proxy.url, config=QueueConfig(store_timeout=1)) as queue,
        LeaseQueue.open(migrated_postgres_url) as witness,
    ):
        very_late = partial(deliver_late, after=4)
        with at_the_commit(proxy, very_late), pytest.raises(LeaseError) as failure:
            queue.enqueue(ITEMS)
        assert "Nothing was written" not in str(failure.value)
        assert "request_id" in str(failure.value)
        deadline = time.monotonic() + 20
        while witness.stats().pending != 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_refused_operation_is_not_run_twice_by_a_lost_connection(proxy: Proxy) -> None:
    """Whatever the line does, a token is good for one completion."""
    with LeaseQueue.open(proxy.url) as queue:
        queue.enqueue(ITEMS)
        leases = queue.lease("worker", limit=3)
        with at_the_commit(proxy, drop_the_answer):
            queue.complete(leases, result={"by": "first"}).raise_if_refused()
        assert len(queue.complete(leases, result={"by": "second"}).accepted) == 3
        assert [status.result for status in queue.inspect([1, 2, 3])] == [{"by": "first"}] * 3
