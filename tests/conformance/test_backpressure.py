"""Watermarks with hysteresis, decided and logged in the transaction that changes the depth; and capacity."""

from __future__ import annotations

import random

import pytest

from lease_core import BackpressureActive, LeaseEvent, LeaseQueue, Receipt
from lease_core.errors import InvalidInput, QueueFull
from tests.conformance.backends import Backend
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import log, nothing_changes, one, types, work, works


def changes(queue: LeaseQueue) -> list[LeaseEvent]:
    return [event for event in log(queue) if event.type == "BackpressureChanged"]


def active(queue: LeaseQueue) -> list[str]:
    return [event.metadata["active"] for event in changes(queue)]


@pytest.fixture
def marked(open_queue: OpenQueue) -> LeaseQueue:
    return open_queue(high_watermark=10, low_watermark=4)


@pytest.mark.parametrize(("depth", "pressed"), [(9, False), (10, True), (11, True)])
def test_pressure_begins_at_the_high_mark(marked: LeaseQueue, depth: int, pressed: bool) -> None:
    marked.enqueue(works(depth))
    assert marked.stats().backpressure is pressed
    assert active(marked) == ["true"] * pressed


@pytest.mark.parametrize(("taken", "pressed"), [(1, True), (5, True), (6, False), (10, False)])
def test_pressure_ends_at_the_low_mark(marked: LeaseQueue, taken: int, pressed: bool) -> None:
    marked.enqueue(works(10))
    marked.lease("worker", taken)
    assert marked.stats().backpressure is pressed


def test_under_pressure_an_enqueue_is_refused_at_once_and_leaves_no_trace(marked: LeaseQueue) -> None:
    marked.enqueue(works(10))
    with nothing_changes(marked), pytest.raises(BackpressureActive) as raised:
        marked.enqueue(work())
    assert raised.value.code == "resourcelease.backpressure_active"
    assert not isinstance(raised.value, QueueFull)


def test_between_the_marks_it_depends_on_where_the_depth_came_from(marked: LeaseQueue) -> None:
    marked.enqueue(works(6))
    assert not marked.stats().backpressure
    marked.enqueue(works(4))
    marked.lease("worker", 4)
    assert marked.stats().pending == 6
    with pytest.raises(BackpressureActive):
        marked.enqueue(work())


def test_after_the_low_mark_producers_are_let_in_again(marked: LeaseQueue) -> None:
    marked.enqueue(works(10))
    marked.lease("worker", 6)
    assert marked.enqueue(work()) == [Receipt(11)]


def test_known_requests_are_answered_even_under_pressure(marked: LeaseQueue) -> None:
    marked.enqueue([work(request_id="r"), *works(9)])
    assert marked.enqueue(work(request_id="r")) == [Receipt(1, duplicate=True)]


def test_the_change_is_logged_once_in_the_same_transaction(marked: LeaseQueue, clock: FakeClock) -> None:
    marked.enqueue(works(9))
    clock.advance(1)
    marked.enqueue(works(3))
    clock.advance(1)
    marked.lease("worker", 7)
    clock.advance(1)
    marked.lease("worker", 2)
    clock.advance(1)
    marked.lease("worker", 2)
    assert types(marked)[9:] == [
        *["Enqueued"] * 3,
        "BackpressureChanged",
        *["LeaseGranted"] * 8,
        *["LeaseGranted"],
        "BackpressureChanged",
        *["LeaseGranted"] * 2,
    ]
    on, off = changes(marked)
    assert (on.timestamp, off.timestamp) == (clock.now(-3), clock.now(-1))
    assert (on.pending, off.pending) == (12, 3)
    assert on.metadata == {"active": "true", "highWatermark": "10", "lowWatermark": "4"}
    assert off.metadata["active"] == "false"


@pytest.mark.parametrize("way", ["lease", "drain", "sweep to death"])
def test_pressure_ends_whatever_made_the_room(open_queue: OpenQueue, clock: FakeClock, way: str) -> None:
    queue = open_queue(high_watermark=3, low_watermark=1, max_attempts=1)
    queue.enqueue(works(3))
    match way:
        case "lease":
            queue.lease("worker", 2)
        case "drain":
            queue.drain(2)
        case "sweep to death":
            queue.lease("worker", 3)
            clock.advance(30)
            queue.sweep()
    assert active(queue) == ["true", "false"]
    assert not queue.stats().backpressure


@pytest.mark.parametrize("way", ["fail", "release", "release_owner", "expire", "restore", "requeue_dead"])
def test_pressure_begins_whatever_made_the_depth(open_queue: OpenQueue, clock: FakeClock, way: str) -> None:
    queue = open_queue(high_watermark=3, low_watermark=0)
    queue.enqueue(works(2))
    if way == "restore":
        drained = queue.drain()
    else:
        leases = queue.lease("worker", 2)
    if way == "requeue_dead":
        queue.fail(leases, "broken", requeue=False)
    queue.enqueue(works(2))
    assert not queue.stats().backpressure
    match way:
        case "fail":
            queue.fail(leases, "broken", delay=60)
        case "release":
            queue.release(leases)
        case "release_owner":
            queue.release_owner("worker")
        case "expire":
            clock.advance(30)
            queue.sweep()
        case "restore":
            queue.restore(drained)
        case "requeue_dead":
            queue.requeue_dead([1, 2])
    assert queue.stats().backpressure
    assert active(queue) == ["true"]
    assert changes(queue)[0].pending == 4


def test_delayed_items_count_towards_the_depth(marked: LeaseQueue, clock: FakeClock) -> None:
    marked.enqueue(works(10, not_before=clock.now(60)))
    assert marked.stats().backpressure


def test_the_low_mark_is_half_of_the_high_one_by_default(open_queue: OpenQueue) -> None:
    queue = open_queue(high_watermark=5)
    queue.enqueue(works(5))
    queue.lease("worker", 2)
    assert queue.stats().backpressure
    one(queue)
    assert not queue.stats().backpressure
    assert changes(queue)[-1].metadata["lowWatermark"] == "2"


def test_a_mark_of_one_lets_in_one_batch_at_a_time(open_queue: OpenQueue) -> None:
    queue = open_queue(high_watermark=1)
    queue.enqueue(work())
    with pytest.raises(BackpressureActive):
        queue.enqueue(work())
    one(queue)
    assert queue.enqueue(work()) == [Receipt(2)]


@pytest.mark.parametrize("seed", range(3))
def test_every_change_is_logged_exactly_once_on_a_random_walk(open_queue: OpenQueue, seed: int) -> None:
    queue = open_queue(high_watermark=8, low_watermark=3)
    dice = random.Random(seed)
    pressed, expected = False, []
    for _ in range(40):
        if dice.random() < 0.5:
            try:
                queue.enqueue(works(dice.randint(1, 5)))
                assert not pressed
            except BackpressureActive:
                assert pressed
        else:
            queue.lease("worker", dice.randint(1, 4))
        pending = queue.stats().pending
        now = pending > 3 if pressed else pending >= 8
        if now != pressed:
            expected.append(str(now).lower())
        pressed = now
        assert queue.stats().backpressure is pressed
    assert active(queue) == expected


def test_capacity_is_never_exceeded_by_an_enqueue(open_queue: OpenQueue) -> None:
    queue = open_queue(capacity=5)
    queue.enqueue(works(3))
    with nothing_changes(queue), pytest.raises(QueueFull) as raised:
        queue.enqueue(works(3))
    assert raised.value.code == "resourcelease.queue_full"
    queue.enqueue(works(2))
    with pytest.raises(QueueFull):
        queue.enqueue(work())
    one(queue)
    assert queue.enqueue(work()) == [Receipt(6)]


def test_duplicates_need_no_room(open_queue: OpenQueue) -> None:
    queue = open_queue(capacity=1)
    queue.enqueue(work(request_id="r"))
    assert queue.enqueue([work(request_id="r")] * 3) == [Receipt(1, duplicate=True)] * 3


def test_a_batch_that_could_never_fit_is_bad_input(open_queue: OpenQueue) -> None:
    queue = open_queue(capacity=2)
    with nothing_changes(queue), pytest.raises(InvalidInput, match=r"items.*2"):
        queue.enqueue(works(3))


def test_retries_and_restores_are_taken_back_even_when_full(open_queue: OpenQueue) -> None:
    queue = open_queue(capacity=2)
    queue.enqueue(works(2))
    drained = queue.drain()
    queue.enqueue(works(2))
    leases = queue.lease("worker", 2)
    queue.enqueue(works(2))
    queue.release(leases)
    queue.restore(drained)
    assert queue.stats().pending == 6


def test_marks_belong_to_the_namespace_and_are_remembered(shared_backend: Backend, open_queue: OpenQueue) -> None:
    open_queue(high_watermark=3, low_watermark=1)
    other = open_queue()
    other.enqueue(works(3))
    assert other.stats().backpressure
    with pytest.raises(BackpressureActive):
        other.enqueue(work())


def test_opening_with_new_marks_sets_them_for_everybody(shared_backend: Backend, open_queue: OpenQueue) -> None:
    first = open_queue(high_watermark=3, capacity=4)
    open_queue(high_watermark=100)
    first.enqueue(works(4))
    assert not first.stats().backpressure
    with pytest.raises(QueueFull):
        first.enqueue(work())
    open_queue(capacity=None)
    first.enqueue(works(10))
    assert first.stats().pending == 14


@pytest.mark.parametrize("marks", [{"high_watermark": None}, {"high_watermark": 100, "low_watermark": 50}])
def test_raising_or_dropping_the_marks_ends_the_pressure_and_logs_it(
    shared_backend: Backend, open_queue: OpenQueue, marks: dict[str, int | None]
) -> None:
    queue = open_queue(high_watermark=3)
    queue.enqueue(works(3))
    open_queue(**marks)
    assert not queue.stats().backpressure
    assert active(queue) == ["true", "false"]
    queue.enqueue(work())


def test_lowering_the_mark_below_the_depth_begins_the_pressure_and_logs_it(
    shared_backend: Backend, open_queue: OpenQueue
) -> None:
    queue = open_queue()
    queue.enqueue(works(5))
    open_queue(high_watermark=5)
    assert active(queue) == ["true"]
    with pytest.raises(BackpressureActive):
        queue.enqueue(work())


def test_opening_without_rules_changes_nothing(shared_backend: Backend, open_queue: OpenQueue) -> None:
    queue = open_queue(high_watermark=3, capacity=3, exclusive="resource")
    queue.enqueue(works(3))
    with nothing_changes(queue):
        open_queue(lease_duration=5)
        open_queue(high_watermark=3, capacity=3, exclusive="resource")
