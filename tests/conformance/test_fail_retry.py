"""A failed item comes back after a pause, behind the others, until its attempts are used up."""

from __future__ import annotations

import random

import pytest

from lease_core import LeaseQueue
from tests.conformance.clock import MICRO, FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import log, nothing_changes, one, state, types, work, works


def test_a_failed_item_waits_for_its_delay(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    queue.fail(one(queue), "broken", delay=10)
    assert (queue.stats().pending, queue.stats().delayed, queue.stats().active) == (1, 1, 0)
    clock.advance(10 - MICRO)
    assert queue.lease("worker") == []
    clock.advance(MICRO)
    assert one(queue).token.attempt == 2


def test_a_delay_of_zero_brings_the_item_back_at_once(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    queue.fail(one(queue), "broken", delay=0)
    assert one(queue).token.attempt == 2


@pytest.mark.parametrize(
    ("delay", "cap", "pauses"),
    [
        (1.0, 300.0, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]),
        (10.0, 25.0, [10, 20, 25, 25]),
        (5.0, 5.0, [5, 5, 5]),
        (0.0, 300.0, [0, 0, 0]),
        (0.000_001, 1.0, [0.000_001, 0.000_002]),
    ],
)
def test_the_pause_doubles_up_to_the_cap_less_a_quarter_at_most(
    open_queue: OpenQueue, clock: FakeClock, delay: float, cap: float, pauses: list[float]
) -> None:
    queue = open_queue(retry_delay=delay, retry_delay_cap=cap, max_attempts=100)
    queue.enqueue(work())
    for pause in pauses:
        queue.fail(one(queue), "broken")
        available = queue.inspect(1)[0].available_at
        assert available is not None
        waited = (available - clock.now()).total_seconds()
        assert pause * 0.75 - MICRO <= waited <= pause
        clock.advance(waited)


def test_the_pause_is_the_same_for_the_same_lease_and_attempt(open_queue: OpenQueue) -> None:
    queue = open_queue(retry_delay=100)
    queue.enqueue(works(6))
    leases = queue.lease("worker", 6)
    for lease in random.Random(1).sample(leases, 6):
        queue.fail(lease, "broken")
    assert len({status.available_at for status in queue.inspect(range(1, 7))}) == 1


def test_batches_that_failed_together_do_not_come_back_in_step(open_queue: OpenQueue) -> None:
    queue = open_queue(retry_delay=100)
    queue.enqueue(works(20))
    for _ in range(20):
        queue.fail(one(queue), "broken")
    assert len({status.available_at for status in queue.inspect(range(1, 21))}) > 10


def test_a_failure_is_logged_with_error_and_time_of_return(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    lease = one(queue, "worker")
    queue.fail(lease, "broken", delay=7, principal="alice")
    event = log(queue)[-1]
    assert (event.type, event.requeued, event.error) == ("Failed", True, "broken")
    assert (event.token, event.peer_id, event.principal) == (lease.token, "worker", "alice")
    assert (event.available_at, event.pending, event.active) == (clock.now(7), 1, 0)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_last_attempt_dead_letters_with_both_events(open_queue: OpenQueue, limit: int) -> None:
    queue = open_queue(max_attempts=limit)
    queue.enqueue(work())
    for attempt in range(1, limit + 1):
        lease = one(queue)
        assert lease.token.attempt == attempt
        queue.fail(lease, f"error {attempt}", delay=0)
    assert types(queue) == ["Enqueued", *["LeaseGranted", "Failed"] * limit, "DeadLettered"]
    failed, dead = log(queue)[-2:]
    assert (failed.requeued, failed.error, failed.token) == (False, f"error {limit}", lease.token)
    assert (dead.error, dead.token, dead.pending, dead.active) == (f"error {limit}", lease.token, 0, 0)
    assert (queue.stats().dead, queue.lease("worker")) == (1, [])


def test_without_requeue_the_first_failure_dead_letters(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    queue.fail(one(queue), "poison", requeue=False)
    assert types(queue)[-2:] == ["Failed", "DeadLettered"]
    assert log(queue)[-2].requeued is False
    assert state(queue, 1) == "dead"


def test_a_repeated_fail_is_accepted_again_and_changes_nothing(queue: LeaseQueue) -> None:
    queue.enqueue(works(2))
    leases = queue.lease("worker", 2)
    queue.fail(leases, "broken")
    with nothing_changes(queue):
        assert len(queue.fail(leases, "something else", delay=0).accepted) == 2


def test_a_repeated_fail_is_no_longer_known_once_the_item_is_leased_again(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    lease = one(queue)
    queue.fail(lease, "broken", delay=0)
    one(queue)
    with nothing_changes(queue):
        assert [each.code for each in queue.fail(lease, "broken").refused] == ["resourcelease.stale_token"]


def test_every_attempt_stays_in_the_error_history(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(max_attempts=3)
    queue.enqueue(works(2))
    times = []
    for attempt in (1, 2, 3):
        queue.fail(queue.lease(f"peer-{attempt}", 2), f"error {attempt}", delay=0)
        times.append(clock.now())
        clock.advance(1)
    for status in queue.inspect([1, 2]):
        assert [(e.attempt, e.error, e.peer_id, e.at) for e in status.errors] == [
            (n, f"error {n}", f"peer-{n}", times[n - 1]) for n in (1, 2, 3)
        ]


def test_errors_belong_to_the_items_that_had_them(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    a, b, c, d, e = queue.lease("worker", 5)
    queue.fail([a, b, d], "first", delay=0)
    queue.fail([e], "other", delay=0)
    queue.complete(c)
    history = {status.sequence_id: [each.error for each in status.errors] for status in queue.inspect(range(1, 6))}
    assert history == {1: ["first"], 2: ["first"], 3: [], 4: ["first"], 5: ["other"]}
    assert [lease.last_error for lease in queue.lease("worker", 4)] == ["first", "first", "first", "other"]


def test_an_error_that_covers_more_than_a_thousand_items_reaches_each(queue: LeaseQueue) -> None:
    queue.enqueue(works(2_500))
    queue.fail(queue.lease("worker", 2_500), "all", delay=0)
    found = queue.inspect([1, 999, 1_000, 1_001, 2_000, 2_001, 2_500])
    assert [[each.error for each in status.errors] for status in found] == [["all"]] * 7
    assert {lease.last_error for lease in queue.lease("worker", 2_500)} == {"all"}


def test_an_exception_is_kept_with_its_type_and_the_end_of_its_stack(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    try:
        raise KeyError("column")
    except KeyError as error:
        queue.fail(one(queue), error, delay=0)
    kept = one(queue).last_error or ""
    assert kept.splitlines()[0] == "KeyError: 'column'"
    assert __file__ in kept


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "ü" * 100_000, "\0", "\ud800", ""], ids=["long", "wide", "nul", "half", "blank"]
)
def test_any_error_text_can_be_kept(queue: LeaseQueue, text: str) -> None:
    queue.enqueue(work())
    queue.fail(one(queue), text, delay=0)
    kept = one(queue).last_error
    assert kept
    assert len(kept.encode()) <= 16_384
    assert log(queue)[-2].error == kept


def test_some_of_a_batch_can_fail_alone(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    leases = queue.lease("worker", 5)
    queue.fail(leases[2], "broken", delay=0)
    assert not queue.complete(leases[:2] + leases[3:], atomic=True).refused
    assert [(lease.token.sequence_id, lease.token.attempt) for lease in queue.lease("worker", 5)] == [(3, 2)]
