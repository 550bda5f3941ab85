"""Who is next: highest priority, then longest available, then lowest id."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lease_core import LeaseQueue
from tests.conformance.clock import MICRO, FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, log, names, nothing_changes, one, work, works


def test_first_in_is_first_out(queue: LeaseQueue) -> None:
    for name in "abc":
        queue.enqueue(work(name))
    assert names(queue.lease("worker", 10)) == ["a", "b", "c"]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_leases_of_any_size_take_what_is_next(queue: LeaseQueue, limit: int) -> None:
    queue.enqueue(works(4))
    queue.enqueue(works(3))
    taken: list[int] = []
    while leases := queue.lease("worker", limit):
        assert len(leases) == min(limit, 7 - len(taken))
        taken += ids(leases)
    assert taken == [1, 2, 3, 4, 5, 6, 7]


def test_an_empty_queue_gives_nothing_and_leaves_no_trace(queue: LeaseQueue) -> None:
    with nothing_changes(queue):
        assert queue.lease("worker", 10) == []


def test_what_one_worker_holds_no_other_gets(queue: LeaseQueue) -> None:
    queue.enqueue(works(4))
    assert ids(queue.lease("first", 3)) == [1, 2, 3]
    assert ids(queue.lease("second", 3)) == [4]
    assert queue.lease("first", 3) == []


def test_a_lease_says_all_about_itself(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(lease_duration=12)
    queue.enqueue(work())
    clock.advance(3)
    lease = one(queue, "worker")
    assert lease.owner_peer_id == "worker"
    assert lease.granted_at == clock.now()
    assert lease.expires_at == clock.now(12)
    assert (lease.token.sequence_id, lease.token.attempt, lease.last_error) == (1, 1, None)
    assert lease.token.lease_id


def test_a_lease_lasts_as_long_as_asked_for(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    assert one(queue, duration=0.5).expires_at == clock.now(0.5)


def test_two_calls_never_share_a_lease_id(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    first, second = queue.lease("worker", 2), queue.lease("worker", 2)
    assert {lease.token.lease_id for lease in first}.isdisjoint(lease.token.lease_id for lease in second)


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        ((0, 1, 2), "cba"),
        ((2, 1, 0), "abc"),
        ((0, 5, 0), "bac"),
        ((-1, 0, -2), "bac"),
        ((-(2**31), 0, 2**31 - 1), "cba"),
        ((1, 1, 1), "abc"),
    ],
)
def test_higher_priority_goes_first(queue: LeaseQueue, priorities: tuple[int, ...], order: str) -> None:
    queue.enqueue([work(name, priority=priority) for name, priority in zip("abc", priorities, strict=True)])
    assert "".join(names(queue.lease("worker", 3))) == order


def test_within_a_priority_it_is_first_come_first_served(queue: LeaseQueue, clock: FakeClock) -> None:
    for name, priority in (("a1", 1), ("b2", 2), ("c1", 1), ("d2", 2)):
        queue.enqueue(work(name, priority=priority))
        clock.advance(1)
    assert names(queue.lease("worker", 2)) == ["b2", "d2"]
    assert names(queue.lease("worker", 2)) == ["a1", "c1"]


@pytest.mark.parametrize(("elapsed", "leased"), [(0, 0), (10 - MICRO, 0), (10, 1), (10 + MICRO, 1)])
def test_a_delayed_item_is_leased_from_its_time_on(
    queue: LeaseQueue, clock: FakeClock, elapsed: float, leased: int
) -> None:
    queue.enqueue(work(not_before=clock.now(10)))
    clock.advance(elapsed)
    assert len(queue.lease("worker")) == leased


def test_a_delayed_item_goes_behind_what_was_available_before_it(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work("delayed", not_before=clock.now(10)))
    clock.advance(5)
    queue.enqueue(work("before"))
    clock.advance(10)
    queue.enqueue(work("after"))
    assert names(queue.lease("worker", 3)) == ["before", "delayed", "after"]


def test_not_before_in_the_past_is_no_way_to_jump_the_queue(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work("first"))
    clock.advance(1)
    queue.enqueue(work("pushy", not_before=clock.now(-3600)))
    assert names(queue.lease("worker", 2)) == ["first", "pushy"]


def test_delayed_items_come_in_the_order_of_their_times(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue([work(str(after), not_before=clock.now(after)) for after in (3, 1, 2)])
    clock.advance(3)
    assert names(queue.lease("worker", 3)) == ["1", "2", "3"]


def test_a_delay_does_not_outweigh_a_priority(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work("plain"))
    queue.enqueue(work("urgent", priority=1, not_before=clock.now(1)))
    clock.advance(1)
    assert names(queue.lease("worker", 2)) == ["urgent", "plain"]


def test_the_most_urgent_goes_first_even_among_very_many_that_become_due_at_once(
    queue: LeaseQueue, clock: FakeClock
) -> None:
    queue.enqueue([work(str(n), not_before=clock.now(n)) for n in range(1, 1_200)])
    queue.enqueue(work("urgent", priority=1, not_before=clock.now(1_200)))
    clock.advance(1_200)
    assert names(queue.lease("worker")) == ["urgent"]


def test_a_failed_item_goes_behind_what_was_waiting(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    failing = one(queue)
    clock.advance(1)
    queue.enqueue(work("4"))
    clock.advance(1)
    queue.fail(failing, "broken", delay=0)
    clock.advance(1)
    queue.enqueue(work("5"))
    assert ids(queue.lease("worker", 10)) == [2, 3, 4, 1, 5]


def test_a_released_item_goes_behind_what_was_waiting(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    lease = one(queue)
    clock.advance(1)
    queue.release(lease)
    assert ids(queue.lease("worker", 10)) == [2, 3, 1]


def test_an_expired_item_is_available_from_its_expiry_on(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(lease_duration=10)
    queue.enqueue(work("1"))
    one(queue)
    clock.advance(5)
    queue.enqueue(work("2"))
    clock.advance(10)
    queue.enqueue(work("3"))
    assert names(queue.lease("worker", 10)) == ["2", "1", "3"]


def test_a_retried_item_keeps_its_priority(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue([work("urgent", priority=1), work("plain")])
    queue.fail(one(queue), "broken", delay=1)
    clock.advance(1)
    assert names(queue.lease("worker", 2)) == ["urgent", "plain"]
    assert [status.item.priority for status in queue.inspect([1, 2])] == [1, 0]


def test_a_retried_item_brings_its_last_error_to_the_next_holder(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(2))
    _, lease = queue.lease("worker", 2)
    queue.fail(lease, "first", delay=0)
    queue.fail(one(queue), "second", delay=0)
    assert one(queue).last_error == "second"
    assert {lease.token.sequence_id: lease.last_error for lease in queue.leases()} == {1: None, 2: "second"}


def test_one_lease_mixes_new_retried_due_and_expired_in_order(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(lease_duration=10)
    queue.enqueue([work("expires"), work("fails"), work("due", not_before=clock.now(11))])
    _, fails = queue.lease("worker", 2)
    queue.fail(fails, "broken", delay=12)
    clock.advance(5)
    queue.enqueue(work("new"))
    clock.advance(15)
    assert names(queue.lease("worker", 10)) == ["new", "expires", "due", "fails"]


def test_expired_work_of_many_owners_is_taken_over_in_one_call(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(lease_duration=10)
    queue.enqueue(works(150))
    for number in range(150):
        one(queue, f"worker-{number}")
    clock.advance(10)
    assert ids(queue.lease("heir", 1_000)) == list(range(1, 151))


@pytest.mark.parametrize("back", [MICRO, 5, 3_600])
def test_a_clock_that_steps_back_stops_nobody(open_queue: OpenQueue, clock: FakeClock, back: float) -> None:
    queue = open_queue(lease_duration=86_400)
    queue.enqueue(works(2))
    clock.advance(-back)
    queue.enqueue(work("3"))
    taken = queue.lease("worker", 10)
    clock.advance(back)
    taken += queue.lease("worker", 10)
    assert sorted(names(taken)) == ["1", "2", "3"]
    assert not queue.complete(taken).refused


def test_the_grant_is_logged_with_owner_token_and_expiry(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work(body=b"large", partition_key="p"))
    lease = one(queue, "worker", principal="alice")
    event = log(queue)[-1]
    assert (event.type, event.peer_id, event.principal) == ("LeaseGranted", "worker", "alice")
    assert (event.token, event.expires_at) == (lease.token, clock.now() + timedelta(seconds=30))
    assert event.item == work(partition_key="p")
    assert (event.pending, event.active) == (0, 1)
