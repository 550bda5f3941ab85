"""Waiting for work and for room: woken by whoever brings it, from any thread or process, and never for nothing."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from lease_core import BackpressureActive, Lease, LeaseQueue, Receipt
from lease_core.errors import LeaseError, QueueFull
from tests.conformance import workers
from tests.conformance.backends import Backend
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import names, one, work, works

SETTLE = 0.1
"""Long enough for a thread to be fast asleep in its wait."""

PROMPT = 5.0
"""Far more than waking takes, far less than the waits below: whoever needs longer was not woken."""

LONG = 30.0

SOON = 2.0
"""Longer than a busy machine takes until a thread waits: what happens then finds it waiting."""


@pytest.fixture
def queue(open_queue: OpenQueue) -> LeaseQueue:
    return open_queue(clock=None)


@contextmanager
def asleep(call: Callable[[], Any]) -> Iterator[Future[Any]]:
    """The call, in a thread of its own, once it waits."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        time.sleep(SETTLE)
        assert not future.done(), "it should be waiting"
        yield future


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    ours, theirs = workers.PROCESSES.Pipe()
    child = workers.PROCESSES.Process(target=target, args=(*arguments, theirs), daemon=True)
    child.start()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join(10)


def test_work_that_is_there_is_given_at_once(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    started = time.monotonic()
    assert len(queue.lease("worker", wait=LONG)) == 1
    assert time.monotonic() - started < PROMPT


def test_an_empty_list_says_that_nothing_came(queue: LeaseQueue) -> None:
    started = time.monotonic()
    assert queue.lease("worker", wait=0.2) == []
    assert 0.2 <= time.monotonic() - started < PROMPT


def wake_by_enqueue(queue: LeaseQueue, _: Lease) -> None:
    queue.enqueue(work())


def wake_by_release(queue: LeaseQueue, held: Lease) -> None:
    queue.release(held)


def wake_by_release_owner(queue: LeaseQueue, held: Lease) -> None:
    queue.release_owner(held.owner_peer_id)


def wake_by_fail(queue: LeaseQueue, held: Lease) -> None:
    queue.fail(held, "broken", delay=0)


def wake_by_delayed_fail(queue: LeaseQueue, held: Lease) -> None:
    queue.fail(held, "broken", delay=0.2)


def wake_by_delayed_enqueue(queue: LeaseQueue, _: Lease) -> None:
    queue.enqueue(work(not_before=datetime.now(UTC) + timedelta(seconds=0.2)))


def wake_by_requeue(queue: LeaseQueue, held: Lease) -> None:
    queue.fail(held, "broken", requeue=False)
    queue.requeue_dead(held.token.sequence_id)


def wake_by_restore(queue: LeaseQueue, held: Lease) -> None:
    other = LeaseQueue.open("sqlite://")
    other.enqueue(work())
    queue.restore(other.drain())
    other.close()


WAKERS = {name.removeprefix("wake_by_"): call for name, call in globals().items() if name.startswith("wake_by_")}


@pytest.mark.parametrize("waker", WAKERS.values(), ids=WAKERS)
def test_a_waiting_worker_wakes_whatever_brings_the_work(
    queue: LeaseQueue, waker: Callable[[LeaseQueue, Lease], None]
) -> None:
    queue.enqueue(work())
    held = one(queue, "holder")
    with asleep(lambda: queue.lease("worker", wait=LONG)) as waiting:
        waker(queue, held)
        assert len(waiting.result(timeout=PROMPT)) == 1


def test_a_waiting_worker_wakes_when_a_delay_that_was_there_before_ends(queue: LeaseQueue) -> None:
    queue.enqueue(work(not_before=datetime.now(UTC) + timedelta(seconds=SOON)))
    with asleep(lambda: queue.lease("worker", wait=LONG)) as waiting:
        [lease] = waiting.result(timeout=PROMPT)
    assert lease.granted_at >= (lease.item.not_before or lease.granted_at)


def test_a_waiting_worker_wakes_when_a_lease_elsewhere_runs_out(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    lost = one(queue, "lost", duration=SOON)
    with asleep(lambda: queue.lease("heir", wait=LONG)) as waiting:
        [lease] = waiting.result(timeout=PROMPT)
    assert lease.token.attempt == 2
    assert lease.granted_at >= lost.expires_at


def test_a_heartbeat_keeps_the_waiting_worker_waiting(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    held = one(queue, "holder", duration=SOON)
    with asleep(lambda: queue.lease("heir", wait=1.5 * SOON)) as waiting:
        for _ in range(8):
            queue.heartbeat(held, duration=SOON)
            time.sleep(0.2 * SOON)
        assert waiting.result(timeout=PROMPT) == []
    assert not queue.complete(held).refused


def test_a_waiting_worker_wakes_when_a_key_is_free(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None, exclusive="resource")
    queue.enqueue([work("a"), work("a")])
    held = one(queue)
    with asleep(lambda: queue.lease("worker", wait=LONG)) as waiting:
        queue.complete(held)
        assert len(waiting.result(timeout=PROMPT)) == 1


def test_each_of_many_waiting_workers_gets_its_item(queue: LeaseQueue) -> None:
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(queue.lease, f"worker-{n}", wait=LONG) for n in range(6)]
        time.sleep(SETTLE)
        for number in range(6):
            queue.enqueue(work(str(number)))
        taken = [lease for future in waiting for lease in future.result(timeout=PROMPT)]
    assert sorted(names(taken)) == [str(number) for number in range(6)]


def test_a_waiting_worker_wakes_by_another_queue_object(shared_backend: Backend, open_queue: OpenQueue) -> None:
    first, second = open_queue(clock=None), open_queue(clock=None)
    with asleep(lambda: first.lease("worker", wait=LONG)) as waiting:
        second.enqueue(work())
        assert len(waiting.result(timeout=PROMPT)) == 1


def test_a_waiting_worker_wakes_by_a_transaction_of_the_users_own(shared_backend: Backend, queue: LeaseQueue) -> None:
    engine = shared_backend.engine()
    with asleep(lambda: queue.lease("worker", wait=LONG)) as waiting:
        with engine.begin() as connection:
            queue.enqueue(work(), connection=connection)
        assert len(waiting.result(timeout=PROMPT)) == 1
    engine.dispose()


def test_a_waiting_worker_wakes_within_50_ms_of_an_enqueue_in_another_process(
    shared_backend: Backend, queue: LeaseQueue
) -> None:
    delays: list[float] = []
    with process(workers.enqueue_on_demand, shared_backend.url, queue.namespace) as (_, line):
        for turn in range(9):
            line.send(0.05 + turn * 0.013)
            assert len(queue.lease("worker", wait=LONG)) == 1
            woken = time.monotonic()
            assert line.poll(PROMPT)
            delays.append(woken - line.recv())
        line.send(None)
    assert statistics.median(delays) < 0.05, delays


def test_an_idle_waiter_costs_no_measurable_cpu(queue: LeaseQueue) -> None:
    queue.lease("worker", wait=0.1)
    before = time.process_time()
    assert queue.lease("worker", wait=1.2) == []
    assert time.process_time() - before < 0.2


def test_a_long_wait_does_not_hold_up_anybody_else(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    held = one(queue, "holder")
    with asleep(lambda: queue.lease("worker", wait=LONG)) as waiting:
        started = time.monotonic()
        queue.heartbeat(held)
        queue.stats()
        queue.complete(held)
        assert time.monotonic() - started < PROMPT
        queue.enqueue(work())
        waiting.result(timeout=PROMPT)


def test_closing_the_queue_wakes_whoever_waits(queue: LeaseQueue) -> None:
    with asleep(lambda: queue.lease("worker", wait=LONG)) as waiting:
        queue.close()
        with pytest.raises(LeaseError):
            waiting.result(timeout=PROMPT)


@pytest.fixture
def pressed(open_queue: OpenQueue) -> LeaseQueue:
    """A queue under pressure: ten items, and room again from four on."""
    queue = open_queue(clock=None, high_watermark=10, low_watermark=4)
    queue.enqueue(works(10))
    return queue


def test_a_producer_waits_no_longer_than_it_wants(pressed: LeaseQueue) -> None:
    started = time.monotonic()
    with pytest.raises(BackpressureActive):
        pressed.enqueue(work(), wait=0.2)
    assert 0.2 <= time.monotonic() - started < PROMPT
    assert pressed.stats().pending == 10


def test_a_producer_with_room_does_not_wait(queue: LeaseQueue) -> None:
    started = time.monotonic()
    assert queue.enqueue(work(), wait=LONG) == [Receipt(1)]
    assert time.monotonic() - started < PROMPT


@pytest.mark.parametrize("way", ["lease", "drain"])
def test_a_waiting_producer_wakes_at_the_low_mark_with_no_further_traffic(pressed: LeaseQueue, way: str) -> None:
    with asleep(lambda: pressed.enqueue(work("late"), wait=LONG)) as waiting:
        pressed.lease("worker", 5)
        time.sleep(SETTLE)
        assert not waiting.done(), "five are still pending: not yet"
        if way == "lease":
            pressed.lease("worker", 1)
        else:
            pressed.drain(1)
        assert waiting.result(timeout=PROMPT) == [Receipt(11)]


def test_all_waiting_producers_wake(pressed: LeaseQueue) -> None:
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(pressed.enqueue, work(str(n)), wait=LONG) for n in range(4)]
        time.sleep(SETTLE)
        pressed.lease("worker", 10)
        assert sorted(future.result(timeout=PROMPT)[0].sequence_id for future in waiting) == [11, 12, 13, 14]


def test_a_waiting_producer_wakes_when_the_marks_are_raised(shared_backend: Backend, open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None, high_watermark=2)
    queue.enqueue(works(2))
    with asleep(lambda: queue.enqueue(work(), wait=LONG)) as waiting:
        open_queue(clock=None, high_watermark=100)
        assert waiting.result(timeout=PROMPT) == [Receipt(3)]


def test_a_producer_waits_for_room_under_the_capacity(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None, capacity=4)
    queue.enqueue(works(4))
    with pytest.raises(QueueFull):
        queue.enqueue(work(), wait=0.05)
    with asleep(lambda: queue.enqueue(works(2), wait=LONG)) as waiting:
        one(queue)
        time.sleep(SETTLE)
        assert not waiting.done(), "there is room for one, not for two"
        one(queue)
        assert waiting.result(timeout=PROMPT) == [Receipt(5), Receipt(6)]


def test_a_waiting_producer_wakes_by_another_process(shared_backend: Backend, pressed: LeaseQueue) -> None:
    with process(workers.lease_on_demand, shared_backend.url, pressed.namespace) as (_, line):
        with asleep(lambda: pressed.enqueue(work(), wait=LONG)) as waiting:
            line.send(6)
            assert waiting.result(timeout=PROMPT) == [Receipt(11)]
        assert line.recv() == 6
        line.send(None)


def test_producers_still_wake_after_another_waiting_one_was_killed(
    shared_backend: Backend, pressed: LeaseQueue
) -> None:
    with process(workers.wait_for_room, shared_backend.url, pressed.namespace) as (child, line):
        assert line.poll(PROMPT)
        line.recv()
        time.sleep(SETTLE)
        with asleep(lambda: pressed.enqueue(work("survivor"), wait=LONG)) as waiting:
            os.kill(child.pid, signal.SIGKILL)
            child.join(PROMPT)
            pressed.lease("worker", 6)
            assert waiting.result(timeout=PROMPT) == [Receipt(11)]
    with asleep(lambda: [pressed.lease("worker", 20), pressed.lease("worker", wait=LONG)]) as waiting:
        pressed.enqueue(work("after"))
        assert len(waiting.result(timeout=PROMPT)[1]) == 1


def test_two_sides_can_keep_each_other_going(open_queue: OpenQueue) -> None:
    """A producer that only ever waits for room, a worker that only ever waits for work: neither may miss a wake-up."""
    queue = open_queue(clock=None, high_watermark=3, low_watermark=1)
    total = 60
    trouble: list[BaseException] = []

    def produce() -> None:
        try:
            for number in range(total):
                queue.enqueue(work(str(number)), wait=LONG)
        except BaseException as error:
            trouble.append(error)

    producer = threading.Thread(target=produce)
    producer.start()
    taken: list[str] = []
    while len(taken) < total and not trouble:
        leases = queue.lease("worker", 2, wait=PROMPT)
        assert leases, f"nothing came after {len(taken)}"
        taken += names(leases)
        queue.complete(leases)
    producer.join(PROMPT)
    assert not trouble
    assert taken == [str(number) for number in range(total)]
