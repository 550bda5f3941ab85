"""One active lease per key, first come first served within the key, and no key waits for another."""

from __future__ import annotations

import pytest

from lease_core import LeaseQueue, QueueConfig
from lease_core.errors import ConfigConflict
from tests.conformance.backends import Backend
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, names, one, state, work, works


@pytest.fixture
def by_resource(open_queue: OpenQueue) -> LeaseQueue:
    return open_queue(exclusive="resource")


@pytest.fixture
def by_partition(open_queue: OpenQueue) -> LeaseQueue:
    return open_queue(exclusive="partition")


def test_one_call_never_leases_two_items_of_a_resource(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("a"), work("a"), work("b"), work("a"), work("b")])
    assert ids(by_resource.lease("worker", 10)) == [1, 3]
    assert by_resource.lease("other", 10) == []


def test_the_same_id_of_another_type_is_another_resource(by_resource: LeaseQueue) -> None:
    kinds = [("a", "bc"), ("ab", "c"), ("a:", "bc"), ("1:a", "bc")]
    by_resource.enqueue([type(work())(kind, name) for kind, name in kinds])
    assert len(by_resource.lease("worker", 10)) == 4


def test_resource_exclusivity_ignores_partitions(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("a", partition_key="1"), work("a", partition_key="2"), work("b", partition_key="1")])
    assert ids(by_resource.lease("worker", 10)) == [1, 3]


def test_partition_exclusivity_ignores_resources(by_partition: LeaseQueue) -> None:
    by_partition.enqueue([work("a", partition_key="1"), work("b", partition_key="1"), work("a", partition_key="2")])
    assert ids(by_partition.lease("worker", 10)) == [1, 3]


def test_items_without_a_partition_are_not_exclusive(by_partition: LeaseQueue) -> None:
    by_partition.enqueue([*works(3), work("x", partition_key="1"), *works(2)])
    assert ids(by_partition.lease("worker", 10)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("end", ["complete", "dead", "purge", "expire to death"])
def test_when_the_first_is_done_the_next_of_its_key_is_free(open_queue: OpenQueue, clock: FakeClock, end: str) -> None:
    queue = open_queue(exclusive="resource", max_attempts=1, lease_duration=10)
    queue.enqueue([work("a"), work("a"), work("a")])
    lease = one(queue)
    match end:
        case "complete":
            queue.complete(lease)
        case "dead" | "purge":
            queue.fail(lease, "broken")
            if end == "purge":
                queue.purge_dead(1)
        case "expire to death":
            clock.advance(10)
    assert ids(queue.lease("worker", 10)) == [2]


@pytest.mark.parametrize("end", ["fail", "fail with a delay", "release", "expire"])
def test_a_retried_item_keeps_its_place_at_the_head_of_its_key(
    open_queue: OpenQueue, clock: FakeClock, end: str
) -> None:
    queue = open_queue(exclusive="resource", lease_duration=10)
    queue.enqueue([work("a"), work("a"), work("b")])
    lease = one(queue)
    clock.advance(1)
    match end:
        case "fail":
            queue.fail(lease, "broken", delay=0)
        case "fail with a delay":
            queue.fail(lease, "broken", delay=60)
            assert ids(queue.lease("worker", 10)) == [3]
            clock.advance(60)
        case "release":
            queue.release(lease)
        case "expire":
            clock.advance(9)
    taken = queue.lease("worker", 10)
    assert 1 in ids(taken)
    assert state(queue, 2) == "pending"


def test_a_key_is_worked_off_in_order(by_resource: LeaseQueue, clock: FakeClock) -> None:
    by_resource.enqueue([work("ab"[n % 2]) for n in range(10)])
    seen: dict[str, list[int]] = {"a": [], "b": []}
    while leases := by_resource.lease("worker", 10):
        assert len({lease.item.resource_id for lease in leases}) == len(leases)
        for lease in leases:
            seen[lease.item.resource_id].append(lease.token.sequence_id)
        by_resource.complete(leases)
        clock.advance(1)
    assert seen == {"a": [1, 3, 5, 7, 9], "b": [2, 4, 6, 8, 10]}


def test_a_busy_key_does_not_hold_up_the_others(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([*(work("busy") for _ in range(500)), work("other")])
    assert names(by_resource.lease("first", 1)) == ["busy"]
    assert names(by_resource.lease("second", 1)) == ["other"]


def test_a_later_enqueue_of_a_leased_key_waits_its_turn(by_resource: LeaseQueue) -> None:
    by_resource.enqueue(work("a"))
    lease = one(by_resource)
    by_resource.enqueue(work("a"))
    assert by_resource.lease("other") == []
    by_resource.complete(lease)
    assert ids(by_resource.lease("other")) == [2]


def test_a_later_enqueue_of_a_waiting_key_waits_its_turn(by_resource: LeaseQueue) -> None:
    by_resource.enqueue(work("a"))
    by_resource.enqueue(work("a"))
    assert ids(by_resource.lease("worker", 10)) == [1]


def test_a_key_that_ran_empty_starts_anew(by_resource: LeaseQueue) -> None:
    for sequence_id in (1, 2, 3):
        by_resource.enqueue(work("a"))
        lease = one(by_resource)
        assert lease.token.sequence_id == sequence_id
        by_resource.complete(lease)


def test_a_heartbeat_keeps_the_key(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(exclusive="resource", lease_duration=10)
    queue.enqueue([work("a"), work("a")])
    lease = one(queue)
    for _ in range(5):
        clock.advance(9)
        queue.heartbeat(lease)
        assert queue.lease("other") == []


def test_a_delayed_item_of_a_key_is_leased_at_its_time(by_resource: LeaseQueue, clock: FakeClock) -> None:
    by_resource.enqueue([work("a", not_before=clock.now(10)), work("b")])
    assert names(by_resource.lease("worker", 10)) == ["b"]
    clock.advance(10)
    assert names(by_resource.lease("worker", 10)) == ["a"]


def test_a_delayed_item_behind_its_key_counts_as_delayed(by_resource: LeaseQueue, clock: FakeClock) -> None:
    by_resource.enqueue([work("a"), work("a", not_before=clock.now(10))])
    assert (by_resource.stats().pending, by_resource.stats().delayed) == (2, 1)
    clock.advance(10)
    assert (by_resource.stats().pending, by_resource.stats().delayed) == (2, 0)


def test_a_delayed_item_that_becomes_the_first_of_its_key_still_waits(
    by_resource: LeaseQueue, clock: FakeClock
) -> None:
    by_resource.enqueue([work("a"), work("a", not_before=clock.now(10))])
    by_resource.complete(one(by_resource))
    assert by_resource.lease("worker") == []
    clock.advance(10)
    assert ids(by_resource.lease("worker")) == [2]


def test_priority_decides_between_keys(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("a"), work("b", priority=1), work("c", priority=2)])
    assert names(by_resource.lease("worker", 2)) == ["c", "b"]


def test_a_drained_head_lets_the_next_of_its_key_through(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("a"), work("a"), work("b")])
    assert len(by_resource.drain(1)) == 1
    assert ids(by_resource.lease("worker", 10)) in ([2, 3], [3, 2])


def test_drain_and_restore_keep_a_key_exclusive_and_in_order(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("ab"[n % 2]) for n in range(6)])
    by_resource.restore(by_resource.drain())
    first = by_resource.lease("worker", 10)
    assert sorted(ids(first)) == [1, 2]
    by_resource.complete(first)
    assert sorted(ids(by_resource.lease("worker", 10))) == [3, 4]


def test_a_restored_item_waits_for_the_holder_of_its_key(by_resource: LeaseQueue) -> None:
    by_resource.enqueue(work("a"))
    drained = by_resource.drain()
    by_resource.enqueue(work("a"))
    lease = one(by_resource)
    by_resource.restore(drained)
    assert by_resource.lease("other") == []
    by_resource.complete(lease)
    assert ids(by_resource.lease("other")) == [1]


def test_a_requeued_dead_letter_waits_for_the_holder_of_its_key(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("a"), work("a"), work("a")])
    by_resource.fail(one(by_resource), "broken", requeue=False)
    by_resource.fail(one(by_resource), "broken", requeue=False)
    lease = one(by_resource)
    assert by_resource.requeue_dead([1, 2]) == [1, 2]
    assert by_resource.lease("other", 10) == []
    by_resource.complete(lease)
    assert ids(by_resource.lease("other", 10)) == [1]


def test_release_owner_frees_keys_in_order(by_resource: LeaseQueue) -> None:
    by_resource.enqueue([work("a"), work("a"), work("b")])
    by_resource.lease("dead", 10)
    by_resource.release_owner("dead")
    assert sorted(ids(by_resource.lease("heir", 10))) == [1, 3]


def test_exclusivity_belongs_to_the_namespace_and_is_remembered(shared_backend: Backend, open_queue: OpenQueue) -> None:
    open_queue(exclusive="resource").enqueue([work("a"), work("a")])
    assert len(open_queue().lease("worker", 10)) == 1


def test_exclusivity_cannot_change_under_items(shared_backend: Backend, open_queue: OpenQueue) -> None:
    queue = open_queue(exclusive="resource")
    queue.enqueue(work("a"))
    for other in ("partition", None):
        with pytest.raises(ConfigConflict, match="exclusive"):
            open_queue(exclusive=other)
    queue.drain()
    assert open_queue(exclusive="partition").config.exclusive == "partition"


def test_making_an_idle_queue_exclusive_holds_for_those_who_have_it_open(
    shared_backend: Backend, open_queue: OpenQueue
) -> None:
    before = open_queue()
    open_queue(exclusive="resource")
    before.enqueue([work("a"), work("a")])
    assert len(before.lease("worker", 10)) == 1


def test_the_default_is_not_exclusive(queue: LeaseQueue) -> None:
    assert QueueConfig().exclusive is None
    queue.enqueue([work("a"), work("a")])
    assert len(queue.lease("worker", 10)) == 2
