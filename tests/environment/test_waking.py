"""Sleepers: consumers waiting for work and producers waiting for room, each in a process of its own."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from lease_core import BackpressureActive, LeaseQueue, QueueConfig, WorkItem
from tests.kills.forks import KILLED, ForkServerProcess, apart, context, running

PROMISED = 0.050
WAKE_UPS = 11
CROWDED = QueueConfig(high_watermark=10, low_watermark=5)


@contextmanager
def reporting(act: Callable[..., object], *arguments: Any) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """A process with a pipe to it."""
    ours, theirs = context.Pipe()
    with running(act, theirs, *arguments) as process:
        theirs.close()
        yield process, ours


def hear(pipe: Connection, timeout: float = 30.0) -> Any:
    assert pipe.poll(timeout), "nothing was heard from the other process"
    return pipe.recv()


def lease_and_tell(pipe: Connection, url: str, times: int) -> None:
    """Sleep until work comes, again and again, and tell when it did. Monotonic time is the machine's, not ours."""
    with LeaseQueue.open(url) as queue:
        for _ in range(times):
            pipe.send("asleep")
            leases = queue.lease("sleeper", wait=30)
            pipe.send((time.monotonic(), len(leases)))
            queue.complete(leases).raise_if_refused()


def test_a_sleeper_wakes_within_50_ms_of_an_enqueue_elsewhere(url: str) -> None:
    with LeaseQueue.open(url) as queue, reporting(lease_and_tell, url, WAKE_UPS) as (_, pipe):
        delays = []
        for n in range(WAKE_UPS):
            assert hear(pipe) == "asleep"
            time.sleep(0.2 + 0.013 * n)
            queue.enqueue(WorkItem("file", str(n)))
            enqueued = time.monotonic()
            woken, leased = hear(pipe)
            assert leased == 1
            delays.append(max(0.0, woken - enqueued))
    print("woken after (ms):", [round(delay * 1000, 1) for delay in delays])
    assert statistics.median(delays) < PROMISED
    assert max(delays) < 5


def cost_of_waiting(url: str, seconds: float) -> float:
    """The part of a processor that this process uses while it waits for work that does not come."""
    with LeaseQueue.open(url) as queue:
        queue.lease("idle", wait=0.2)
        start = time.process_time()
        assert queue.lease("idle", wait=seconds) == []
        return (time.process_time() - start) / seconds


def test_an_idle_sleeper_costs_nothing_to_speak_of(url: str) -> None:
    share = apart(cost_of_waiting, url, 3.0)
    print(f"{share:.2%} of a processor")
    assert share < 0.02 or apart(cost_of_waiting, url, 3.0) < 0.02


def test_a_sleeper_wakes_for_a_delay_that_ends_and_a_lease_that_expires(url: str) -> None:
    """Nobody writes anything in the meantime: the sleeper must know by itself when to look."""
    with LeaseQueue.open(url) as queue:
        queue.enqueue(WorkItem("file", "a"))
        [lease] = queue.lease("first")
        queue.fail(lease, "later", delay=1)
        with reporting(lease_and_tell, url, 1) as (_, pipe):
            assert hear(pipe) == "asleep"
            assert hear(pipe)[1] == 1
        queue.enqueue(WorkItem("file", "b"))
        assert len(queue.lease("dies", duration=1)) == 1
        with reporting(lease_and_tell, url, 1) as (_, pipe):
            assert hear(pipe) == "asleep"
            assert hear(pipe)[1] == 1


def test_many_sleepers_share_what_comes(url: str) -> None:
    with LeaseQueue.open(url) as queue, ExitStack() as stack:
        pipes = [stack.enter_context(reporting(lease_and_tell, url, 1))[1] for _ in range(4)]
        assert [hear(pipe) for pipe in pipes] == ["asleep"] * 4
        time.sleep(0.3)
        queue.enqueue([WorkItem("file", str(n)) for n in range(4)])
        assert [hear(pipe)[1] for pipe in pipes] == [1, 1, 1, 1]


# Producers


def enqueue_and_tell(pipe: Connection, url: str) -> None:
    with LeaseQueue.open(url) as queue:
        pipe.send("asleep")
        try:
            queue.enqueue(WorkItem("file", "late"), wait=30)
            pipe.send("in")
        except BackpressureActive:
            pipe.send("gave up")


@pytest.fixture
def crowded(url: str) -> Iterator[LeaseQueue]:
    """A queue that takes no more until five are left."""
    with LeaseQueue.open(url, config=CROWDED) as queue:
        queue.enqueue([WorkItem("file", str(n)) for n in range(10)])
        assert queue.stats().backpressure
        yield queue


def test_a_waiting_producer_wakes_when_another_process_makes_room(crowded: LeaseQueue, url: str) -> None:
    with reporting(enqueue_and_tell, url) as (_, pipe):
        assert hear(pipe) == "asleep"
        time.sleep(0.5)
        crowded.lease("worker", limit=4)
        assert not pipe.poll(0.5), "six are still waiting, which is above the low mark"
        crowded.lease("worker", limit=1)
        made_room = time.monotonic()
        assert hear(pipe) == "in"
        assert time.monotonic() - made_room < 5
        assert crowded.stats().pending == 6


def test_a_waiting_producer_wakes_though_the_one_before_it_was_killed(crowded: LeaseQueue, url: str) -> None:
    with reporting(enqueue_and_tell, url) as (victim, first), reporting(enqueue_and_tell, url) as (_, second):
        assert [hear(first), hear(second)] == ["asleep"] * 2
        time.sleep(0.5)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        assert victim.exitcode == KILLED
        crowded.lease("worker", limit=5)
        made_room = time.monotonic()
        assert hear(second) == "in"
        assert time.monotonic() - made_room < 5
        assert crowded.stats().pending == 6


def lease_and_die(url: str) -> None:
    with LeaseQueue.open(url) as queue:
        queue.lease("worker", limit=5)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_waiting_producer_wakes_though_the_one_who_made_room_was_killed(crowded: LeaseQueue, url: str) -> None:
    with reporting(enqueue_and_tell, url) as (_, pipe):
        assert hear(pipe) == "asleep"
        time.sleep(0.5)
        with running(lease_and_die, url) as process:
            process.join(30)
            assert process.exitcode == KILLED
        assert hear(pipe) == "in"


def test_several_waiting_producers_all_get_in(crowded: LeaseQueue, url: str) -> None:
    with ExitStack() as stack:
        pipes = [stack.enter_context(reporting(enqueue_and_tell, url))[1] for _ in range(3)]
        assert [hear(pipe) for pipe in pipes] == ["asleep"] * 3
        time.sleep(0.5)
        crowded.lease("worker", limit=10)
        assert [hear(pipe) for pipe in pipes] == ["in"] * 3


def test_a_producer_that_waits_in_vain_is_told(crowded: LeaseQueue) -> None:
    started = time.monotonic()
    with pytest.raises(BackpressureActive):
        crowded.enqueue(WorkItem("file", "late"), wait=0.5)
    assert 0.4 < time.monotonic() - started < 5


def test_a_producer_waiting_for_capacity_wakes(url: str) -> None:
    with LeaseQueue.open(url, config=QueueConfig(capacity=3)) as queue:
        queue.enqueue([WorkItem("file", str(n)) for n in range(3)])
        with reporting(enqueue_and_tell, url) as (_, pipe):
            assert hear(pipe) == "asleep"
            time.sleep(0.5)
            queue.lease("worker")
            assert hear(pipe) == "in"
