"""Taking items out and putting them back, here or elsewhere: nothing lost, nothing twice."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import pytest

from lease_core import LeaseQueue, LeaseToken, PendingItem, Receipt, WorkItem
from lease_core.errors import InvalidInput
from lease_core.model import ErrorRecord, from_json
from tests.conformance.backends import Backend
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.replay import replay
from tests.conformance.vocabulary import ids, log, names, nothing_changes, one, state, types, work, works

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def stray(sequence_id: int, name: str = "stray", **fields: object) -> PendingItem:
    """An item from who knows where."""
    return PendingItem(work(name), sequence_id, 0, LONG_AGO, **fields)  # type: ignore[arg-type]


def test_drain_takes_all_that_is_pending_in_the_order_of_leasing(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue([work("plain"), work("late", not_before=clock.now(9)), work("high", priority=1), work("held")])
    held = queue.lease("worker", 3)[2]
    queue.release([lease for lease in queue.leases() if lease.token != held.token])
    assert names(queue.drain()) == ["high", "plain", "late"]
    assert (queue.stats().pending, queue.stats().active) == (0, 1)
    assert not queue.complete(held).refused


def test_drain_takes_as_many_as_asked_for(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    assert names(queue.drain(2)) == ["1", "2"]
    assert names(queue.drain(2)) == ["3", "4"]
    assert names(queue.lease("worker", 9)) == ["5"]


def test_drain_of_an_empty_queue_leaves_no_trace(queue: LeaseQueue) -> None:
    with nothing_changes(queue):
        assert queue.drain() == []


def test_drain_takes_more_than_one_transaction_can(queue: LeaseQueue) -> None:
    queue.enqueue(works(2_345))
    drained = queue.drain()
    assert [item.sequence_id for item in drained] == list(range(1, 2_346))
    assert types(queue).count("Drained") == 2_345


def test_a_drained_item_says_all_about_itself(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work(body=b"b", attributes={"k": "v"}, request_id="r", priority=3))
    enqueued = clock.now()
    lease = one(queue, "worker")
    clock.advance(1)
    queue.fail(lease, "broken")
    [item] = queue.drain(principal="operator")
    assert item.item == lease.item
    assert (item.sequence_id, item.attempt, item.enqueued_at) == (1, 1, enqueued)
    assert (item.last_error, item.last_token, item.dead_lettered) == ("broken", lease.token, False)
    assert item.errors == (ErrorRecord(1, clock.now(), "broken", "worker"),)
    assert (item.namespace, item.queue_id) == (queue.namespace, queue.queue_id)
    event = log(queue)[-1]
    assert (event.type, event.sequence_id, event.principal, event.pending) == ("Drained", 1, "operator", 0)


def test_the_queue_goes_on_working_after_a_drain(queue: LeaseQueue) -> None:
    queue.enqueue(works(2))
    queue.drain()
    assert queue.enqueue(work("new")) == [Receipt(3)]
    assert names(queue.lease("worker", 9)) == ["new"]


def test_a_drained_item_survives_its_journey_as_json(queue: LeaseQueue) -> None:
    queue.enqueue(work(body=bytes(range(256)), attributes={"ü": "🚀"}, partition_key="p"))
    queue.fail(one(queue), "broken")
    drained = queue.drain()
    copies = [from_json(PendingItem, item.to_json()) for item in drained]
    assert copies == drained
    assert queue.restore(copies) == [Receipt(1)]


def test_restore_on_the_same_queue_brings_everything_back(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    leases = queue.lease("worker", 3)
    queue.fail(leases[0], "broken")
    queue.release(leases[1:])
    before = {status.sequence_id: (status.attempt, status.token, status.errors) for status in queue.inspect([1, 2, 3])}
    assert queue.restore(queue.drain()) == [Receipt(2), Receipt(3), Receipt(1)]
    assert before == {s.sequence_id: (s.attempt, s.token, s.errors) for s in queue.inspect([1, 2, 3])}
    assert queue.stats().pending == 3
    assert queue.drained() == []
    clock.advance(1)
    assert {lease.token.sequence_id: lease.token.attempt for lease in queue.lease("worker", 3)} == {1: 2, 2: 1, 3: 1}


def test_restore_twice_is_restore_once(queue: LeaseQueue) -> None:
    queue.enqueue(works(2))
    drained = queue.drain()
    queue.restore(drained)
    with nothing_changes(queue):
        assert queue.restore(drained) == [Receipt(1, True), Receipt(2, True)]


def test_an_item_given_twice_in_one_restore_is_restored_once(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    [item] = queue.drain()
    assert queue.restore([item, item]) == [Receipt(1), Receipt(1, True)]
    assert queue.stats().pending == 1


@pytest.mark.parametrize("fate", ["leased", "completed", "dead"])
def test_restoring_again_later_does_not_do_the_work_again(queue: LeaseQueue, fate: str) -> None:
    queue.enqueue(work())
    drained = queue.drain()
    queue.restore(drained)
    lease = one(queue)
    if fate == "completed":
        queue.complete(lease)
    elif fate == "dead":
        queue.fail(lease, "broken", requeue=False)
    with nothing_changes(queue):
        assert queue.restore(drained) == [Receipt(1, True)]


def test_after_a_crash_in_between_the_drained_items_can_be_read_again(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    lost = queue.drain()
    clock.advance(3_600)
    assert queue.drained() == lost
    assert queue.restore(queue.drained()) == [Receipt(1), Receipt(2), Receipt(3)]
    assert queue.drained() == []


def test_drained_items_are_listed_page_by_page(queue: LeaseQueue) -> None:
    queue.enqueue(works(10))
    queue.drain()
    queue.restore([item for item in queue.drained() if item.sequence_id % 4 == 0])
    assert [item.sequence_id for item in queue.drained(after=2, limit=3)] == [3, 5, 6]
    assert [item.sequence_id for item in queue.drained(after=6)] == [7, 9, 10]


def test_restore_in_another_queue_keeps_id_attempt_token_and_error(open_queue: OpenQueue) -> None:
    source, target = open_queue("source"), open_queue("target")
    source.enqueue(works(2, body=b"b"))
    lease = source.lease("worker", 2)[1]
    source.fail(lease, "broken")
    [item] = source.drain()
    assert target.restore(item, principal="operator") == [Receipt(2)]
    [status] = target.inspect(2)
    assert (status.item, status.state, status.attempt) == (item.item, "pending", 1)
    assert (status.token, status.enqueued_at) == (lease.token, item.enqueued_at)
    assert status.errors[-1].error == "broken"
    event = log(target)[-1]
    assert (event.type, event.sequence_id, event.attempt, event.token) == ("Restored", 2, 1, lease.token)
    assert (event.item, event.error, event.principal) == (item.item, "broken", "operator")
    assert event.enqueued_at == item.enqueued_at
    assert event.pending == 1
    again = one(target)
    assert (again.token.attempt, again.last_error) == (2, "broken")
    assert target.enqueue(work("next")) == [Receipt(3)]


@pytest.mark.parametrize("history", ["never leased", "failed", "released", "failed then released", "expired"])
def test_what_comes_out_of_the_other_queue_is_what_went_in(
    open_queue: OpenQueue, clock: FakeClock, history: str
) -> None:
    source, target = open_queue("source"), open_queue("target")
    source.enqueue(work(request_id="r"))
    if "failed" in history:
        source.fail(one(source), "broken", delay=0)
    if "released" in history:
        source.release(one(source))
    if "expired" in history:
        one(source, duration=1)
        clock.advance(1)
        source.sweep()
    [went_in] = source.drain()
    target.restore(went_in)
    assert replay(log(target))[1].status() == target.inspect(1)[0]
    [came_out] = target.drain()
    assert (came_out.item, came_out.attempt, came_out.last_token) == (went_in.item, went_in.attempt, went_in.last_token)
    assert (came_out.last_error, came_out.enqueued_at) == (went_in.last_error, went_in.enqueued_at)
    assert [error.error for error in came_out.errors] == [error.error for error in went_in.errors]


def test_the_token_of_another_life_is_good_for_nothing_in_the_other_queue(open_queue: OpenQueue) -> None:
    source, target = open_queue("source"), open_queue("target")
    source.enqueue(work())
    lease = one(source)
    source.release(lease)
    target.restore(source.drain())
    with nothing_changes(target):
        assert len(target.complete(lease).refused) == 1
        assert len(target.heartbeat(lease).refused) == 1


def test_restore_in_another_queue_twice_is_once(open_queue: OpenQueue) -> None:
    source, target = open_queue("source"), open_queue("target")
    source.enqueue(works(2))
    drained = source.drain()
    target.restore(drained)
    with nothing_changes(target):
        assert target.restore(drained) == [Receipt(1, True), Receipt(2, True)]
    target.complete(target.lease("worker", 2))
    with nothing_changes(target):
        assert target.restore(drained) == [Receipt(1, True), Receipt(2, True)]


def test_where_the_id_is_taken_a_new_one_is_given_and_the_origin_recorded(open_queue: OpenQueue) -> None:
    source, target = open_queue("source"), open_queue("target")
    source.enqueue(works(2))
    target.enqueue(work("occupant"))
    drained = source.drain()
    first, second = target.restore(drained)
    assert sorted([first.sequence_id, second.sequence_id]) == [2, 3]
    assert target.inspect(1)[0].item.resource_id == "occupant"
    origins = {
        event.sequence_id: (event.metadata["originNamespace"], event.metadata["originId"])
        for event in log(target)
        if event.type == "Restored"
    }
    assert origins == {first.sequence_id: (source.namespace, "1"), second.sequence_id: (source.namespace, "2")}
    with nothing_changes(target):
        assert target.restore(drained) == [Receipt(first.sequence_id, True), Receipt(second.sequence_id, True)]
    assert sorted(names(target.lease("worker", 9))) == ["1", "2", "occupant"]


def test_two_sources_with_the_same_ids_both_fit_into_one_target(open_queue: OpenQueue) -> None:
    target = open_queue("target")
    for name in ("first", "second"):
        source = open_queue(name)
        source.enqueue(work(name))
        target.restore(source.drain())
    assert sorted(names(target.lease("worker", 9))) == ["first", "second"]


def test_items_of_unknown_queues_are_told_apart_by_their_namespace(queue: LeaseQueue) -> None:
    strays = [stray(1, "a", namespace="a"), stray(1, "b", namespace="b")]
    receipts = queue.restore(strays)
    assert [receipt.duplicate for receipt in receipts] == [False, False]
    assert [receipt.duplicate for receipt in queue.restore(strays)] == [True, True]
    assert sorted(names(queue.lease("worker", 9))) == ["a", "b"]


def test_an_item_without_origin_can_be_restored_twice(queue: LeaseQueue) -> None:
    assert queue.restore(stray(7)) == [Receipt(7)]
    assert queue.restore(stray(7)) == [Receipt(7, True)]
    assert queue.stats().pending == 1


def test_a_known_request_is_not_restored_beside_its_item(open_queue: OpenQueue) -> None:
    source, target = open_queue("source"), open_queue("target")
    target.enqueue([work("x"), work("mine", request_id="r")])
    source.enqueue(work("copy", request_id="r"))
    with nothing_changes(target):
        assert target.restore(source.drain()) == [Receipt(2, True)]


@pytest.mark.parametrize("request_id", [None, "r"])
def test_a_round_trip_through_another_queue_loses_nothing(open_queue: OpenQueue, request_id: str | None) -> None:
    home, away = open_queue("home"), open_queue("away")
    home.enqueue(work("traveller", request_id=request_id))
    away.enqueue(work("occupant"))
    away.restore(home.drain())
    away.lease("worker", 1)
    home.restore(away.drain())
    assert (home.stats().pending, away.stats().pending) == (1, 0)
    assert names(home.lease("worker", 9)) == ["traveller"]


@pytest.mark.parametrize("request_id", [None, "r"])
def test_a_round_trip_keeps_what_happened_on_the_way(open_queue: OpenQueue, request_id: str | None) -> None:
    home, away = open_queue("home"), open_queue("away")
    home.enqueue(work("traveller", request_id=request_id))
    away.restore(home.drain())
    away.fail(one(away), "first", delay=0)
    lease = one(away)
    away.fail(lease, "second")
    [receipt] = home.restore(away.drain())
    [status] = home.inspect(receipt.sequence_id)
    assert (status.state, status.attempt) == ("pending", 2)
    assert (status.token and status.token.lease_id) == lease.token.lease_id
    assert [error.error for error in status.errors] == ["first", "second"]


def test_dead_letters_can_be_carried_to_another_queue(open_queue: OpenQueue) -> None:
    source, target = open_queue("source"), open_queue("target")
    source.enqueue(work())
    for text in ("one", "two"):
        source.fail(one(source), text, delay=0)
    source.fail(one(source), "three", requeue=False)
    [letter] = source.dead_letters()
    assert target.restore(letter) == [Receipt(1)]
    [copy] = target.dead_letters()
    assert (copy.item, copy.attempt, copy.last_error, copy.last_token) == (
        letter.item,
        3,
        "three",
        letter.last_token,
    )
    assert [error.error for error in copy.errors] == ["one", "two", "three"]
    assert (target.stats().dead, target.stats().pending, target.lease("worker")) == (1, 0, [])
    event = log(target)[-1]
    assert (event.type, event.requeued) == ("Restored", False)
    assert target.requeue_dead(1) == [1]
    assert one(target).token.attempt == 1


def test_restoring_a_dead_letter_where_it_lies_changes_nothing(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    queue.fail(one(queue), "broken", requeue=False)
    with nothing_changes(queue):
        assert queue.restore(queue.dead_letters()) == [Receipt(1, True)]


def test_an_id_beyond_the_counter_moves_the_counter(queue: LeaseQueue) -> None:
    assert queue.restore(stray(1_000)) == [Receipt(1_000)]
    assert queue.enqueue(work()) == [Receipt(1_001)]
    assert queue.restore(stray(500, "between")) == [Receipt(500)]
    assert queue.enqueue(work()) == [Receipt(1_002)]


@pytest.mark.parametrize("poison", [0, -1, 2**53, 2**62, 2**63 - 1, 2**63, 10**30])
def test_an_id_that_would_poison_the_counter_is_refused(queue: LeaseQueue, poison: int) -> None:
    with nothing_changes(queue), pytest.raises(InvalidInput, match="sequence_id"):
        queue.restore([stray(5), stray(poison)])
    assert queue.enqueue(work()) == [Receipt(1)]


def test_an_attempt_that_no_counter_can_follow_is_refused_or_harmless(queue: LeaseQueue) -> None:
    with suppress(InvalidInput):
        queue.restore(PendingItem(work("old"), 1, 2**31 - 1, LONG_AGO))
    queue.enqueue(work("new"))
    assert "new" in names(queue.lease("worker", 9))


def test_an_item_with_all_attempts_used_up_gets_one_more_after_its_restore(open_queue: OpenQueue) -> None:
    queue = open_queue(max_attempts=2)
    queue.restore(PendingItem(work(), 1, 7, LONG_AGO))
    lease = one(queue)
    assert lease.token.attempt == 8
    queue.fail(lease, "broken")
    assert state(queue, 1) == "dead"


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_delay_still_holds_after_a_restore(open_queue: OpenQueue, clock: FakeClock, where: str) -> None:
    source = open_queue("source")
    target = source if where == "here" else open_queue("target")
    source.enqueue(work(not_before=clock.now(60)))
    target.restore(source.drain())
    assert (target.stats().delayed, target.lease("worker")) == (1, [])
    clock.advance(60)
    assert len(target.lease("worker")) == 1


def test_a_restored_item_goes_behind_what_was_waiting(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(2))
    drained = queue.drain(1)
    clock.advance(1)
    queue.restore(drained)
    assert ids(queue.lease("worker", 2)) == [2, 1]


def test_an_item_drained_long_ago_can_still_be_restored_after_it_was_forgotten(
    open_queue: OpenQueue, clock: FakeClock
) -> None:
    queue = open_queue(retention=100)
    queue.enqueue(works(2, partition_key="p"))
    drained = queue.drain()
    clock.advance(101)
    assert queue.sweep().forgotten == 2
    assert queue.drained() == []
    assert queue.restore(drained) == [Receipt(1), Receipt(2)]
    assert queue.restore(drained) == [Receipt(1, True), Receipt(2, True)]
    assert len(queue.lease("worker", 9)) == 2


def test_some_of_what_was_drained_together_can_be_restored_alone(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    drained = queue.drain()
    assert queue.restore([drained[3], drained[1]]) == [Receipt(4), Receipt(2)]
    assert [state(queue, n) for n in range(1, 6)] == ["drained", "pending", "drained", "pending", "drained"]
    assert [item.sequence_id for item in queue.drained()] == [1, 3, 5]


def test_a_drain_and_restore_is_seen_by_other_openers(shared_backend: Backend, open_queue: OpenQueue) -> None:
    first, second = open_queue(), open_queue()
    first.enqueue(works(2))
    drained = second.drain()
    assert first.lease("worker") == []
    first.restore(drained)
    assert len(second.lease("worker", 2)) == 2


def test_an_empty_restore_leaves_no_trace(queue: LeaseQueue) -> None:
    with nothing_changes(queue):
        assert queue.restore([]) == []


def test_a_bad_item_refuses_the_whole_restore(queue: LeaseQueue) -> None:
    bad = PendingItem(WorkItem("", "x"), 2, 0, LONG_AGO)
    with nothing_changes(queue), pytest.raises(InvalidInput, match=r"items\[1\].*resource_type"):
        queue.restore([stray(1), bad])


def test_a_fence_from_another_life_does_not_confuse_the_next_grant(queue: LeaseQueue) -> None:
    token = LeaseToken(1, 3, "elsewhere", 10**9)
    queue.restore(PendingItem(work(), 1, 3, LONG_AGO, last_token=token))
    assert queue.inspect(1)[0].token == token
    lease = one(queue)
    assert lease.token.attempt == 4
    assert not queue.complete(lease).refused


def test_neighbours_that_come_back_from_elsewhere_have_their_errors_once(open_queue: OpenQueue) -> None:
    """They failed together, so that one row tells of all of them, and come back in one call."""
    here, there = open_queue("here", retry_delay=0), open_queue("there")
    here.enqueue([WorkItem("file", str(n), request_id=f"r{n}") for n in range(5)])
    here.fail(here.lease("worker", limit=5), "broken")
    there.restore(here.drain(limit=4))
    here.restore(there.drain(limit=4))
    assert [len(status.errors) for status in here.inspect(range(1, 6))] == [1] * 5
