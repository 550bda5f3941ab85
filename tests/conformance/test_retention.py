"""Forgetting: finished items after their retention, events that no reader needs, and never anything else."""

from __future__ import annotations

import pytest

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned, InvalidInput, LeaseError, StoreBusy
from tests.conformance.clock import MICRO, FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, log, nothing_changes, one, state, work, works


@pytest.mark.parametrize(("elapsed", "known"), [(0, True), (100, True), (100 + MICRO, False)])
def test_a_completed_item_is_kept_for_its_retention(
    open_queue: OpenQueue, clock: FakeClock, elapsed: float, known: bool
) -> None:
    queue = open_queue(retention=100)
    queue.enqueue(work())
    queue.complete(one(queue), result="kept")
    clock.advance(elapsed)
    assert queue.sweep().forgotten == (not known)
    assert [status.result for status in queue.inspect(1)] == ["kept"] * known


def test_forgetting_is_not_news(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=0)
    queue.enqueue(works(3))
    queue.complete(queue.lease("worker", 3))
    before = queue.stats()
    clock.advance(1)
    assert queue.sweep().forgotten == 3
    assert queue.stats() == before
    assert queue.stats().completed == 3


def test_what_is_not_finished_is_never_forgotten(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=0)
    queue.enqueue([*works(3), work("4", not_before=clock.now(10**6))])
    leases = queue.lease("worker", 3, duration=86_400)
    queue.fail(leases[0], "broken", requeue=False)
    queue.release(leases[1])
    clock.advance(3_600)
    assert queue.sweep().forgotten == 0
    assert [state(queue, n) for n in (1, 2, 3, 4)] == ["dead", "pending", "leased", "pending"]


def test_part_of_a_batch_is_forgotten_when_its_time_has_come(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=100)
    queue.enqueue(works(6))
    leases = queue.lease("worker", 6, duration=3_600)
    queue.complete(leases[1::2])
    clock.advance(60)
    queue.complete(leases[0])
    clock.advance(60)
    assert queue.sweep().forgotten == 3
    assert [state(queue, n) for n in range(1, 7)] == ["completed", None, "leased", None, "leased", None]
    assert not queue.complete([leases[2], leases[4]]).refused


def test_any_number_is_forgotten_in_small_steps(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=1)
    for start in range(3):
        queue.enqueue(works(1_000))
        leases = queue.lease("worker", 1_000)
        queue.complete(leases[start::2])
        queue.complete(leases)
    clock.advance(2)
    assert queue.sweep().forgotten == 3_000
    assert queue.inspect(range(1, 3_001)) == []


def test_leasing_pays_for_the_upkeep_when_nobody_sweeps(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=1)
    queue.enqueue(works(2))
    queue.complete(one(queue))
    clock.advance(2)
    queue._forget_at = 0.0  # five seconds of real time have passed
    one(queue)
    assert state(queue, 1) is None


def test_trouble_during_the_upkeep_does_not_cost_the_leases(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    queue._forget_at = 0.0
    locked: list[str] = []

    def disturb(point: str) -> None:
        locked.append(point)
        if locked.count("locked") > 1:
            raise StoreBusy("another writer came first")

    queue._store.probe = disturb
    assert ids(queue.lease("worker")) == [1]


@pytest.mark.parametrize(("before", "gone"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 4), (6, 5), (99, 5)])
def test_events_below_a_number_are_pruned_by_whole_transactions(queue: LeaseQueue, before: int, gone: int) -> None:
    queue.enqueue(work())
    queue.enqueue(works(3))
    queue.enqueue(work())
    whole = log(queue)
    assert queue.prune_events(before=before) == gone
    assert queue.events(after=gone) == whole[gone:]


@pytest.mark.parametrize(("age", "gone"), [(0, 3), (10, 2), (15, 1), (20, 1), (21, 0)])
def test_events_are_pruned_by_age(queue: LeaseQueue, clock: FakeClock, age: float, gone: int) -> None:
    for _ in range(3):
        queue.enqueue(work())
        clock.advance(10)
    clock.advance(-10)
    assert queue.prune_events(older_than=age) == gone


def test_number_and_age_must_both_allow_it(queue: LeaseQueue, clock: FakeClock) -> None:
    for _ in range(4):
        queue.enqueue(work())
        clock.advance(10)
    assert queue.prune_events(before=4, older_than=30) == 2
    assert queue.prune_events(before=3, older_than=0) == 2


def test_a_reader_who_comes_too_late_is_told_so(queue: LeaseQueue) -> None:
    for _ in range(5):
        queue.enqueue(work())
    queue.prune_events(before=4)
    for after in (0, 1, 2):
        with pytest.raises(EventsPruned) as raised:
            queue.events(after=after)
        assert (raised.value.after, raised.value.oldest) == (after, 4)
    assert [event.sequence_number for event in queue.events(after=3)] == [4, 5]
    with pytest.raises(EventsPruned):
        queue.register_reader("late", after=2)


def test_a_log_pruned_to_its_end_goes_on_where_it_was(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    assert queue.prune_events(older_than=0) == 3
    assert queue.events(after=3) == []
    with pytest.raises(EventsPruned):
        queue.events()
    queue.enqueue(work())
    assert [event.sequence_number for event in queue.events(after=3)] == [4]
    assert queue.stats().head == 4


def test_pruning_touches_no_item(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    leases = queue.lease("worker", 3)
    queue.fail(leases[0], "broken", requeue=False)
    with nothing_changes(queue):
        queue.prune_events(older_than=0)
    assert not queue.complete(leases[1:]).refused
    assert queue.dead_letters()[0].last_error == "broken"


def test_pruning_takes_any_number_of_small_transactions(queue: LeaseQueue) -> None:
    for _ in range(1_100):
        queue.enqueue(work())
    assert queue.prune_events(before=1_051) == 1_050
    assert len(log(queue, after=1_050)) == 50


def test_the_log_is_kept_for_the_slowest_reader(queue: LeaseQueue) -> None:
    for _ in range(6):
        queue.enqueue(work())
    assert queue.register_reader("slow") == 0
    assert queue.register_reader("fast", after=3) == 3
    assert queue.prune_events(before=100) == 0
    queue.advance_reader("slow", 2)
    assert queue.prune_events(before=100) == 2
    queue.advance_reader("slow", 5)
    assert queue.prune_events(before=100) == 3
    queue.drop_reader("fast")
    assert queue.prune_events(before=100) == 5
    queue.drop_reader("slow")
    assert queue.prune_events(before=100) == 6


def test_a_reader_in_the_middle_of_a_transaction_keeps_all_of_it(queue: LeaseQueue) -> None:
    queue.enqueue(works(4))
    queue.register_reader("reader", after=2)
    assert queue.prune_events(before=100) == 0
    assert len(queue.events(after=2)) == 2


def test_a_registered_reader_keeps_its_place(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    queue.register_reader("reader", after=3)
    assert queue.register_reader("reader", after=0) == 3
    queue.advance_reader("reader", 5)
    queue.advance_reader("reader", 1)
    assert queue.register_reader("reader") == 5


def test_a_reader_cannot_be_ahead_of_the_log(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    queue.register_reader("reader")
    with pytest.raises(InvalidInput, match="to"):
        queue.advance_reader("reader", 4)
    with pytest.raises(InvalidInput, match="after"):
        queue.register_reader("eager", after=4)


def test_a_reader_nobody_registered_cannot_advance(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    with pytest.raises(InvalidInput, match="name"):
        queue.advance_reader("nobody", 1)
    queue.drop_reader("nobody")


def test_readers_of_one_queue_do_not_hold_up_another(open_queue: OpenQueue) -> None:
    first, second = open_queue("first"), open_queue("second")
    for queue in (first, second):
        queue.enqueue(work())
    first.register_reader("reader")
    assert (first.prune_events(before=9), second.prune_events(before=9)) == (0, 1)


def test_something_to_go_by_must_be_given(queue: LeaseQueue) -> None:
    with pytest.raises(InvalidInput, match="before"):
        queue.prune_events()


def test_a_very_long_retention_means_for_ever(open_queue: OpenQueue) -> None:
    try:
        queue = open_queue(retention=1e18)
    except LeaseError:
        return  # refusing it is fine too
    queue.enqueue(work())
    queue.complete(one(queue))
    assert queue.sweep().forgotten == 0
