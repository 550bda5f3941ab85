"""Holding on to leases: kept alive while work goes on, and given up before anybody else can have them."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import sqlalchemy as sa

from lease_core import Lease, LeaseLost, LeaseQueue, QueueConfig, WorkItem
from tests.environment.proxy import Proxy
from tests.environment.test_waking import hear, reporting

BRIEF = QueueConfig(lease_duration=2, retry_delay=0)


class Losses:
    """Counts and times the calls of ``on_lost``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Lease, ...]] = []
        self.moments: list[float] = []
        self.happened = threading.Event()

    def __call__(self, lost: tuple[Lease, ...]) -> None:
        self.moments.append(time.monotonic())
        self.calls.append(lost)
        self.happened.set()


def leased(queue: LeaseQueue, count: int = 1) -> list[Lease]:
    queue.enqueue([WorkItem("file", str(n)) for n in range(count)])
    return queue.lease("holder", limit=count)


def test_heartbeats_keep_a_short_lease_alive_through_a_long_block(url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        leases = leased(queue, 3)
        losses = Losses()
        with queue.hold(leases, losses) as hold:
            time.sleep(BRIEF.lease_duration * 2)
            assert queue.lease("thief", limit=3) == []
            hold.check()
            assert hold.held == tuple(leases)
        queue.complete(leases, atomic=True).raise_if_refused()
        assert losses.calls == []
        assert "Heartbeat" in {event.type for event in queue.events()}


def test_more_leases_than_one_call_takes_are_held_together() -> None:
    with LeaseQueue.open("sqlite://", config=QueueConfig(lease_duration=1, max_batch=2)) as queue:
        for _ in range(2):
            queue.enqueue([WorkItem("file", str(n)) for n in range(2)])
        leases = [lease for _ in range(2) for lease in queue.lease("holder", limit=2)]
        with queue.hold(leases) as hold:
            time.sleep(1.5)
            hold.check()
            assert hold.held == tuple(leases)


def test_a_callback_that_raises_ends_no_heartbeats(caplog: pytest.LogCaptureFixture) -> None:
    """The error is told; the leases that are not lost are kept on."""
    with LeaseQueue.open("sqlite://", config=QueueConfig(lease_duration=1)) as queue:
        leases = leased(queue, 2)
        lost = Losses()

        def fail(given: tuple[Lease, ...]) -> None:
            lost(given)
            raise RuntimeError("cannot cancel the job")

        with queue.hold(leases, fail) as hold:
            thief = LeaseQueue(queue._store, queue._ns, queue.namespace, queue.queue_id, queue.config)
            thief.release(leases[0])  # as an operator would, from another process
            assert lost.happened.wait(20)
            head = queue.stats().head
            deadline = time.monotonic() + 20
            while len([e for e in queue.events(after=head) if e.type == "Heartbeat"]) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert hold.held == (leases[1],)
        assert lost.calls == [(leases[0],)]
        assert "cannot cancel the job" in caplog.text


def test_the_hold_ends_with_its_block(url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        with queue.hold(leased(queue)):
            pass
        head = queue.stats().head
        assert len(queue.lease("next", wait=10)) == 1
        assert [event.type for event in queue.events(after=head)] == ["Expired", "LeaseGranted"]


def test_a_lease_taken_over_is_lost_and_said_so_once(url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        mine = leased(queue, 2)
        losses = Losses()
        with queue.hold(mine, losses) as hold, LeaseQueue.open(url) as supervisor:
            supervisor.release_owner("holder")  # as one does who believes this holder dead
            assert len(supervisor.lease("thief", limit=2, duration=60)) == 2
            assert losses.happened.wait(10)
            assert hold.lost == tuple(mine)
            assert hold.held == ()
            with pytest.raises(LeaseLost, match="publish nothing"):
                hold.check()
            time.sleep(BRIEF.lease_duration)
        assert len(losses.calls) == 1
        assert queue.complete(mine).accepted == ()


def test_one_lost_lease_leaves_the_others_held(url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        leases = leased(queue, 3)
        losses = Losses()
        with queue.hold(leases, losses) as hold, LeaseQueue.open(url) as supervisor:
            supervisor.release(leases[1])
            assert losses.happened.wait(10)
            assert hold.lost == (leases[1],)
            time.sleep(BRIEF.lease_duration * 1.5)
            assert hold.held == (leases[0], leases[2])
        assert len(queue.complete([leases[0], leases[2]]).accepted) == 2
        assert losses.calls == [(leases[1],)]


def test_what_is_forgotten_is_never_lost(url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        leases = leased(queue, 2)
        losses = Losses()
        with queue.hold(leases, losses) as hold:
            hold.forget(leases[0])
            queue.complete(leases[0]).raise_if_refused()
            time.sleep(BRIEF.lease_duration * 1.5)
            assert hold.lost == ()
            assert hold.held == (leases[1],)
        assert losses.calls == []


def test_a_lease_completed_in_the_block_is_not_lost(url: str) -> None:
    """It is done with, and the queue that completed it knows; heartbeats that come after are nobody's loss."""
    with LeaseQueue.open(url, config=BRIEF) as queue:
        leases = leased(queue, 4)
        losses = Losses()
        with queue.hold(leases, losses) as hold:
            queue.complete(leases[0]).raise_if_refused()
            queue.fail(leases[1], "no luck").raise_if_refused()
            queue.release(leases[2]).raise_if_refused()
            time.sleep(BRIEF.lease_duration * 1.5)
            hold.check()
            assert hold.held == (leases[3],)
        assert losses.calls == []


# The database cannot be reached. Then the holder's own monotonic clock decides, before the lease really ends.


@contextmanager
def sqlite_unreachable(url: str) -> Iterator[None]:
    """Somebody keeps the file locked."""
    connection = sqlite3.connect(str(sa.make_url(url).database), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


@contextmanager
def frozen(proxy: Proxy) -> Iterator[None]:
    """The network carries nothing, and nobody is told."""
    proxy.freeze()
    try:
        yield
    finally:
        proxy.thaw()


def check_lost_in_time(queue: LeaseQueue, unreachable: Any) -> None:
    [lease] = leased(queue)
    losses = Losses()
    granted = time.monotonic()
    with queue.hold(lease, losses) as hold:
        time.sleep(0.2)
        with unreachable:
            assert losses.happened.wait(20), "nobody said that the lease is lost"
            assert hold.lost == (lease,)
            # the last heartbeat that got through was sent within the first 0.2 s, or it was the grant itself
            assert losses.moments[0] - granted < 0.2 + BRIEF.lease_duration + 0.1, "said after the lease had ended"
        with pytest.raises(LeaseLost):
            hold.check()
        time.sleep(BRIEF.lease_duration)
        assert hold.lost == (lease,), "lost is lost, even if the database is back"
    assert len(losses.calls) == 1


def test_a_lease_is_lost_before_it_ends_if_the_file_cannot_be_reached(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with LeaseQueue.open(url, config=BRIEF) as queue:
        check_lost_in_time(queue, sqlite_unreachable(url))


def test_a_lease_is_lost_before_it_ends_if_the_server_cannot_be_reached(proxy: Proxy) -> None:
    with LeaseQueue.open(proxy.url, config=BRIEF) as queue:
        check_lost_in_time(queue, frozen(proxy))


def test_lost_is_known_before_the_thief_gets_the_lease(proxy: Proxy, migrated_postgres_url: str) -> None:
    """The holder is cut off; another worker takes over as soon as the database lets it."""
    taken: list[float] = []

    def steal() -> None:
        with LeaseQueue.open(migrated_postgres_url, config=BRIEF) as direct:
            if direct.lease("thief", wait=30):
                taken.append(time.monotonic())

    with LeaseQueue.open(proxy.url, config=BRIEF) as queue:
        [lease] = leased(queue)
        losses = Losses()
        with queue.hold(lease, losses) as hold, frozen(proxy):
            thief = threading.Thread(target=steal)
            thief.start()
            while not hold.lost:
                time.sleep(0.005)
            known = time.monotonic()
            thief.join()
            assert losses.happened.wait(10)
        assert known < taken[0], "another one had the lease while this one still trusted it"
        assert losses.moments[0] < taken[0]
        assert queue.complete(lease).accepted == ()


def test_a_hold_that_begins_late_trusts_no_more_than_what_is_left(proxy: Proxy) -> None:
    """Most of the lease is over when the hold begins, and its first heartbeat does not get through."""
    config = QueueConfig(lease_duration=3, store_timeout=0.5)
    with LeaseQueue.open(proxy.url, config=config) as queue:
        asked = time.monotonic()
        [lease] = leased(queue)
        time.sleep(1.8)
        proxy.cut_all()
        proxy.freeze()
        with queue.hold(lease) as hold:
            while (looked := time.monotonic()) and not hold.lost:
                assert looked - asked < config.lease_duration, "trusted after its end"
                time.sleep(0.01)
        proxy.thaw()


def test_a_lease_from_elsewhere_is_not_trusted_until_the_queue_confirms_it(proxy: Proxy) -> None:
    """Its age is unknown here, so what it says about its end is worth nothing without a heartbeat."""
    config = QueueConfig(lease_duration=60, store_timeout=0.5)
    with LeaseQueue.open(proxy.url, config=config) as queue:
        [lease] = leased(queue)
        with LeaseQueue.open(proxy.url, config=config) as other:
            with other.hold(lease) as hold:
                assert hold.lost == ()
            proxy.cut_all()
            proxy.freeze()
            with other.hold(lease) as hold:
                assert hold.lost == (lease,)
            proxy.thaw()


# A holder that is paused, and does not know


def hold_and_complete(pipe: Connection, url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        [lease] = queue.lease("paused")
        with queue.hold(lease) as hold:
            pipe.send("holding")
            pipe.recv()  # stopped in here, and continued long after the lease ended
            trusted = not hold.lost
            result = queue.complete(lease)
            pipe.send((trusted, len(result.accepted), [refusal.code for refusal in result.refused]))


def test_a_paused_holder_is_refused_when_it_goes_on(url: str) -> None:
    with LeaseQueue.open(url, config=BRIEF) as queue:
        queue.enqueue(WorkItem("file", "a"))
        with reporting(hold_and_complete, url) as (process, pipe):
            assert hear(pipe) == "holding"
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            try:
                [lease] = queue.lease("next", wait=30, duration=60)
            finally:
                os.kill(process.pid, signal.SIGCONT)
            pipe.send("go on")
            trusted, accepted, codes = hear(pipe)
            assert (trusted, accepted) == (False, 0)
            assert codes == ["resourcelease.stale_token"]
        queue.complete(lease).raise_if_refused()
        assert [event.type for event in queue.events()].count("Completed") == 1
