"""Handing work back without burning an attempt: by token, or for everything a dead peer holds."""

from __future__ import annotations

from lease_core import LeaseQueue
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, log, nothing_changes, one, state, tokens, types, work, works


def test_a_released_item_is_available_at_once_and_no_attempt_is_used(open_queue: OpenQueue) -> None:
    queue = open_queue(max_attempts=1)
    queue.enqueue(work())
    for _ in range(5):
        lease = one(queue)
        assert lease.token.attempt == 1
        assert queue.release(lease).accepted == (lease.token,)
    assert (state(queue, 1), queue.inspect(1)[0].attempt, queue.inspect(1)[0].errors) == ("pending", 0, ())


def test_a_release_gives_back_only_its_own_attempt(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    queue.fail(one(queue), "broken", delay=0)
    queue.release(one(queue))
    lease = one(queue)
    assert (lease.token.attempt, lease.last_error) == (2, "broken")


def test_a_release_is_logged_and_counted(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(2))
    lease = queue.lease("worker", 2)[0]
    clock.advance(1)
    queue.release(lease, principal="alice")
    event = log(queue)[-1]
    assert (event.type, event.token, event.peer_id) == ("Released", lease.token, "worker")
    assert (event.principal, event.available_at, event.error) == ("alice", clock.now(), None)
    assert (event.pending, event.active) == (1, 1)


def test_a_repeated_release_is_accepted_again_and_changes_nothing(queue: LeaseQueue) -> None:
    queue.enqueue(works(2))
    leases = queue.lease("worker", 2)
    queue.release(leases)
    with nothing_changes(queue):
        assert queue.release(leases).accepted == tuple(tokens(leases))


def test_a_repeated_release_does_not_take_the_item_from_its_next_holder(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    lease = one(queue, "first")
    queue.release(lease)
    assert one(queue, "second").token.attempt == lease.token.attempt
    with nothing_changes(queue):
        assert [each.code for each in queue.release(lease).refused] == ["resourcelease.stale_token"]


def test_part_of_a_batch_can_be_released(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    leases = queue.lease("worker", 5)
    queue.release([leases[3], leases[1]])
    assert [state(queue, n) for n in range(1, 6)] == ["leased", "pending", "leased", "pending", "leased"]
    assert ids(queue.lease("other", 5)) == [2, 4]
    assert not queue.complete([leases[0], leases[2], leases[4]]).refused


def test_release_owner_hands_back_everything_a_peer_holds(queue: LeaseQueue) -> None:
    queue.enqueue(works(6))
    mine = queue.lease("dead", 2) + queue.lease("dead", 1)
    other = queue.lease("alive", 2)
    assert queue.release_owner("dead", principal="operator") == 3
    assert types(queue).count("Released") == 3
    assert {event.principal for event in log(queue) if event.type == "Released"} == {"operator"}
    assert [each.code for each in queue.heartbeat(mine).refused] == ["resourcelease.stale_token"] * 3
    assert not queue.heartbeat(other).refused
    assert sorted(ids(queue.lease("heir", 10))) == [1, 2, 3, 6]
    assert {lease.token.attempt for lease in queue.leases()} == {1}


def test_release_owner_of_a_stranger_leaves_no_trace(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    one(queue, "worker")
    with nothing_changes(queue):
        assert queue.release_owner("work") == 0


def test_release_owner_leaves_what_has_expired_to_expiry(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(2))
    one(queue, "dead", duration=10)
    one(queue, "dead", duration=20)
    clock.advance(10)
    assert queue.release_owner("dead") == 1
    assert queue.lease("heir", 2)[0].token.attempt == 2


def test_release_owner_copes_with_very_many_leases(queue: LeaseQueue) -> None:
    queue.enqueue([work(str(n), priority=n % 2) for n in range(1_200)])
    for _ in range(600):
        queue.lease("dead", 2)
    assert queue.release_owner("dead") == 1_200
    assert (queue.stats().active, queue.stats().pending) == (0, 1_200)
