"""Looking without touching: the queue in numbers, its leases, and where single items stand."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest

from lease_core import LeaseQueue, QueueStats
from lease_core.errors import QueueClosed
from lease_core.model import ItemStatus
from tests.conformance.backends import Backend
from tests.conformance.clock import MICRO, FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, nothing_changes, one, tokens, work, works


def test_a_new_queue_is_empty_in_every_number(queue: LeaseQueue) -> None:
    assert queue.stats() == QueueStats(
        pending=0, active=0, delayed=0, dead=0, oldest_pending_age=None, backpressure=False, head=0, completed=0
    )
    assert (queue.leases(), queue.dead_letters(), queue.drained(), queue.inspect(1)) == ([], [], [], [])


def test_each_number_counts_its_own(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue([*works(6), work("late", not_before=clock.now(60))])
    a, b, c, *_ = queue.lease("worker", 4)
    queue.complete(a)
    queue.fail(b, "broken", requeue=False)
    queue.fail(c, "broken", delay=30)
    clock.advance(2)
    assert queue.stats() == QueueStats(
        pending=4, active=1, delayed=2, dead=1, oldest_pending_age=2.0, backpressure=False, head=15, completed=1
    )


@pytest.mark.parametrize(("elapsed", "delayed", "age"), [(10 - MICRO, 1, None), (10, 0, 0.0), (12.5, 0, 2.5)])
def test_a_delayed_item_counts_and_ages_from_its_time_on(
    queue: LeaseQueue, clock: FakeClock, elapsed: float, delayed: int, age: float | None
) -> None:
    queue.enqueue(work(not_before=clock.now(10)))
    clock.advance(elapsed)
    stats = queue.stats()
    assert (stats.pending, stats.delayed, stats.oldest_pending_age) == (1, delayed, age)


def test_the_oldest_counts_whatever_its_priority(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work("old", priority=-5))
    clock.advance(10)
    queue.enqueue(work("new", priority=5))
    clock.advance(1)
    assert queue.stats().oldest_pending_age == 11
    assert one(queue).item.resource_id == "new"
    assert queue.stats().oldest_pending_age == 11


def test_age_counts_from_the_retry_not_from_the_enqueue(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    lease = one(queue)
    clock.advance(5)
    queue.release(lease)
    clock.advance(2)
    assert queue.stats().oldest_pending_age == 2


def test_looking_changes_nothing(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    queue.lease("worker", 2)
    clock.advance(31)
    with nothing_changes(queue):
        queue.stats()
        queue.leases()
        queue.inspect([1, 2, 3])
        queue.events()
    assert queue.stats().active == 2


def test_inspect_shows_a_waiting_item(queue: LeaseQueue, clock: FakeClock) -> None:
    item = work(body=b"b", not_before=clock.now(5))
    queue.enqueue(item)
    assert queue.inspect(1) == [ItemStatus(1, "pending", item, 0, clock.now(), available_at=clock.now(5))]


def test_inspect_shows_who_holds_an_item(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    enqueued = clock.now()
    clock.advance(1)
    lease = one(queue, "worker")
    assert queue.inspect(1) == [
        ItemStatus(
            1,
            "leased",
            work(),
            1,
            enqueued,
            available_at=clock.now(),
            owner_peer_id="worker",
            token=lease.token,
            expires_at=clock.now(30),
        )
    ]


def test_inspect_gives_items_by_id_once_and_leaves_out_the_unknown(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    queue.complete(queue.lease("worker", 2)[1])
    assert [status.sequence_id for status in queue.inspect([5, 2, 99, 2, 1])] == [1, 2, 5]
    assert [status.sequence_id for status in queue.inspect(n for n in (4, 3))] == [3, 4]
    assert queue.inspect([]) == []


def test_leases_are_listed_by_what_ends_first(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(4))
    long, short, medium = (one(queue, name, duration=duration) for name, duration in (("a", 30), ("b", 10), ("c", 20)))
    assert queue.leases() == [short, medium, long]
    assert queue.leases(limit=2) == [short, medium]
    clock.advance(5)
    queue.heartbeat(short, duration=60)
    assert tokens(queue.leases()) == [medium.token, long.token, short.token]


def test_a_limit_may_cut_through_a_batch(queue: LeaseQueue) -> None:
    queue.enqueue(works(6))
    leases = queue.lease("worker", 6)
    assert queue.leases(limit=4) == leases[:4]


def test_the_time_for_scattered_items_does_not_grow_with_their_square(queue: LeaseQueue) -> None:
    queue.enqueue(works(2_000))
    leases = queue.lease("worker", 2_000)
    queue.complete(leases[::2])
    started = time.monotonic()
    assert len(queue.inspect(range(1, 2_001, 2))) == 1_000
    assert not queue.heartbeat(leases[1::2]).refused
    assert time.monotonic() - started < 4


def test_a_closed_queue_says_so(queue: LeaseQueue) -> None:
    queue.close()
    queue.close()
    for call in (queue.stats, queue.events, queue.drain, lambda: queue.lease("w"), lambda: queue.enqueue(work())):
        with pytest.raises(QueueClosed):
            call()  # type: ignore[operator]


def test_a_queue_is_a_context_manager_and_its_items_outlive_it(shared_backend: Backend, open_queue: OpenQueue) -> None:
    with open_queue() as first:
        first.enqueue(works(2))
        lease = one(first)
    second = open_queue()
    assert not second.complete(lease).refused
    assert ids(second.lease("worker", 9)) == [2]


def test_its_name_does_not_give_the_password_away(queue: LeaseQueue) -> None:
    shown = repr(queue)
    assert queue.namespace in shown
    password = queue._store.url.password
    assert password is None or str(password) not in shown


def test_whoever_looks_while_others_work_sees_no_item_twice(queue: LeaseQueue) -> None:
    queue.enqueue(works(60))
    stop = threading.Event()
    trouble: list[BaseException] = []

    def churn() -> None:
        dice = random.Random(7)
        try:
            while not stop.is_set():
                leases = queue.lease("worker", 50)
                dice.shuffle(leases)
                queue.release(leases[:20])
                queue.release(leases[20:])
        except BaseException as error:
            trouble.append(error)

    worker = threading.Thread(target=churn)
    worker.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not trouble:
            found = [status.sequence_id for status in queue.inspect(range(1, 61, 3))]
            assert found == list(range(1, 61, 3))
            held = [lease.token.sequence_id for lease in queue.leases()]
            assert len(held) == len(set(held))
            stats = queue.stats()
            assert stats.pending + stats.active == 60
    finally:
        stop.set()
        worker.join(30)
    assert not trouble


def test_leases_can_be_listed_without_the_bodies(queue: LeaseQueue) -> None:
    queue.enqueue([work(name, body=b"x" * 1_000, partition_key="p", attributes={"a": "1"}) for name in "abc"])
    queue.lease("worker", 1)
    queue.lease("worker", 2)
    whole = queue.leases()
    light = queue.leases(bodies=False)
    assert [lease.item.body for lease in light] == [b"", b"", b""]
    assert [msgspec.structs.replace(lease.item, body=b"") for lease in whole] == [lease.item for lease in light]
    assert [(lease.token, lease.expires_at) for lease in whole] == [(lease.token, lease.expires_at) for lease in light]
    assert len(queue.leases(2, bodies=False)) == 2
