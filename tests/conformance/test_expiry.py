"""A lease that ran out is taken over by whoever leases next; nothing depends on a reaper."""

from __future__ import annotations

import pytest

from lease_core import LeaseQueue
from lease_core.model import SweepResult
from tests.conformance.clock import MICRO, FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, log, names, nothing_changes, one, state, types, work, works


def test_lease_takes_over_what_expired_and_logs_both(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    lost = one(queue, "lost", duration=10)
    clock.advance(10)
    heir = one(queue, "heir")
    assert heir.token.attempt == 2
    assert types(queue) == ["Enqueued", "LeaseGranted", "Expired", "LeaseGranted"]
    expired, granted = log(queue)[-2:]
    assert (expired.token, expired.peer_id, expired.requeued) == (lost.token, "lost", True)
    assert (expired.pending, expired.active) == (1, 0)
    assert expired.available_at == lost.expires_at
    assert (granted.token, granted.pending, granted.active) == (heir.token, 0, 1)


@pytest.mark.parametrize(("elapsed", "taken"), [(10 - MICRO, 0), (10, 1), (10 + MICRO, 1)])
def test_a_lease_expires_at_its_time_and_not_before(
    queue: LeaseQueue, clock: FakeClock, elapsed: float, taken: int
) -> None:
    queue.enqueue(work())
    one(queue, duration=10)
    clock.advance(elapsed)
    assert len(queue.lease("heir")) == taken


@pytest.mark.parametrize(("elapsed", "expired"), [(10 - MICRO, 0), (10, 3)])
def test_sweep_makes_expiry_visible(queue: LeaseQueue, clock: FakeClock, elapsed: float, expired: int) -> None:
    queue.enqueue(works(3))
    queue.lease("worker", 3, duration=10)
    clock.advance(elapsed)
    assert queue.sweep() == SweepResult(expired=expired)
    assert queue.stats().active == 3 - expired
    assert types(queue).count("Expired") == expired


def test_a_second_sweep_finds_nothing(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    one(queue)
    clock.advance(30)
    queue.sweep()
    with nothing_changes(queue):
        assert queue.sweep() == SweepResult()


@pytest.mark.parametrize("durations", [(60, 10), (10, 60)])
def test_a_short_lease_runs_out_in_time_whatever_else_is_held(
    queue: LeaseQueue, clock: FakeClock, durations: tuple[float, float]
) -> None:
    queue.enqueue(works(2))
    leases = {duration: one(queue, duration=duration) for duration in durations}
    queue.heartbeat(leases[60], duration=90)
    clock.advance(10)
    assert ids(queue.lease("heir", 2)) == [leases[10].token.sequence_id]
    clock.advance(80)
    assert sorted(ids(queue.lease("heir", 2))) == [1, 2]


def test_sweep_ends_any_number_of_leases(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue([work(str(n), priority=n % 2) for n in range(900)])
    for _ in range(450):
        queue.lease("worker", 2)
    clock.advance(30)
    assert queue.sweep().expired == 900
    assert queue.stats().pending == 900


def test_an_expired_lease_counts_as_an_attempt_with_an_error(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    one(queue, "lost")
    clock.advance(30)
    lease = one(queue)
    assert lease.token.attempt == 2
    assert "lost" in (lease.last_error or "")
    [error] = queue.inspect(1)[0].errors
    assert (error.attempt, error.peer_id, error.at) == (1, "lost", clock.now())


@pytest.mark.parametrize("by", ["lease", "sweep"])
def test_the_last_attempt_expires_into_the_dead_letters(open_queue: OpenQueue, clock: FakeClock, by: str) -> None:
    queue = open_queue(max_attempts=2, lease_duration=10)
    queue.enqueue(work())
    one(queue, "first")
    clock.advance(10)
    one(queue, "second")
    clock.advance(10)
    if by == "lease":
        assert queue.lease("third") == []
    else:
        assert queue.sweep() == SweepResult(expired=1, dead_lettered=1)
    assert types(queue)[-2:] == ["Expired", "DeadLettered"]
    expired, dead = log(queue)[-2:]
    assert (expired.requeued, expired.active, expired.pending) == (False, 0, 0)
    assert (dead.active, dead.pending, dead.token) == (0, 0, expired.token)
    [letter] = queue.dead_letters()
    assert (letter.attempt, letter.dead_lettered, [e.peer_id for e in letter.errors]) == (2, True, ["first", "second"])
    assert (queue.stats().dead, queue.stats().active) == (1, 0)


def test_takeover_hands_out_the_living_while_it_buries_the_dead(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(max_attempts=2, lease_duration=10)
    queue.enqueue(works(2))
    queue.fail(one(queue), "broken", delay=1)
    clock.advance(1)
    assert ids(queue.lease("worker", 2)) == [2, 1]
    clock.advance(10)
    assert ids(queue.lease("heir", 2)) == [2]
    assert (state(queue, 1), state(queue, 2)) == ("dead", "leased")


def test_takeover_fills_the_batch_with_new_work(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(lease_duration=10)
    queue.enqueue(works(2))
    one(queue)
    clock.advance(10)
    queue.enqueue(work("3"))
    assert names(queue.lease("heir", 10)) == ["2", "1", "3"]


def test_an_expired_lease_is_still_listed_until_somebody_notices(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    one(queue, "lost")
    clock.advance(31)
    assert [lease.owner_peer_id for lease in queue.leases()] == ["lost"]
    queue.sweep()
    assert queue.leases() == []


def test_part_of_a_batch_expires_after_the_rest_was_completed(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(6))
    leases = queue.lease("worker", 6)
    queue.complete([leases[0], leases[3]])
    clock.advance(30)
    assert ids(queue.lease("heir", 10)) == [2, 3, 5, 6]
    assert sorted(event.sequence_id or 0 for event in log(queue) if event.type == "Expired") == [2, 3, 5, 6]


def test_a_dead_lettering_takeover_with_no_other_work_gives_nothing(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(max_attempts=1)
    queue.enqueue(works(3))
    queue.lease("worker", 3)
    clock.advance(30)
    assert queue.lease("heir", 3) == []
    assert queue.stats().dead == 3


def test_a_takeover_of_very_many_that_all_die_still_finds_the_one_that_lives(
    open_queue: OpenQueue, clock: FakeClock
) -> None:
    queue = open_queue(max_attempts=2, lease_duration=10)
    queue.enqueue(works(250))
    queue.fail(queue.lease("worker", 250), "broken", delay=0)
    for _ in range(250):
        one(queue)
    clock.advance(1)
    queue.enqueue(work("lives"))
    one(queue)
    clock.advance(10)
    assert names(queue.lease("heir")) == ["lives"]
