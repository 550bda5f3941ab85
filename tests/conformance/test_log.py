"""The log is dense, in order, complete, and readable from any number in pages of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lease_core import LeaseEvent, LeaseQueue
from lease_core.model import from_json
from tests.conformance.backends import Backend
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import log, one, types, work, works


def lively(queue: LeaseQueue, clock: FakeClock) -> None:
    """A bit of everything, in transactions of different sizes."""
    queue.enqueue(works(7))
    a, b, c, d, _ = queue.lease("worker", 5)
    queue.heartbeat([a, c])
    queue.complete([b, a], result={"n": 1})
    queue.fail(c, "broken", delay=3)
    queue.fail([d], "poison", requeue=False)
    clock.advance(31)
    queue.lease("heir", 9)
    queue.release_owner("heir")
    queue.restore(queue.drain())
    queue.requeue_dead(4)


def test_numbers_are_dense_and_times_never_go_back(queue: LeaseQueue, clock: FakeClock) -> None:
    lively(queue, clock)
    events = log(queue)
    assert [event.sequence_number for event in events] == list(range(1, queue.stats().head + 1))
    assert all(before.timestamp <= after.timestamp for before, after in pairwise(events))
    assert {event.namespace for event in events} == {queue.namespace}
    assert {event.schema_version for event in events} == {1}


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 13, 1_000])
def test_pages_of_any_size_give_the_same_log(queue: LeaseQueue, clock: FakeClock, limit: int) -> None:
    lively(queue, clock)
    whole = queue.events(limit=1_000)
    paged: list[LeaseEvent] = []
    while page := queue.events(after=len(paged), limit=limit):
        assert len(page) == min(limit, len(whole) - len(paged))
        paged += page
    assert paged == whole


def test_reading_may_start_at_any_number(queue: LeaseQueue, clock: FakeClock) -> None:
    lively(queue, clock)
    whole = queue.events()
    for after in range(len(whole) + 1):
        assert queue.events(after=after) == whole[after:]


def test_beyond_the_end_there_is_nothing(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    assert queue.events(after=3) == []
    assert queue.events(after=2**62) == []


def test_the_log_of_a_new_queue_is_empty(queue: LeaseQueue) -> None:
    assert (queue.events(), queue.stats().head) == ([], 0)


def test_many_small_transactions_are_read_in_one_call(queue: LeaseQueue) -> None:
    for number in range(700):
        queue.enqueue(work(str(number)))
    events = queue.events(limit=10_000)
    assert [event.item.resource_id for event in events if event.item] == [str(n) for n in range(700)]
    assert queue.events(after=650, limit=10) == events[650:660]


def test_every_event_survives_json(queue: LeaseQueue, clock: FakeClock) -> None:
    lively(queue, clock)
    for event in log(queue):
        assert from_json(LeaseEvent, event.to_json()) == event


def test_a_reader_survives_fields_and_types_it_has_never_heard_of(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    newer = queue.events()[0].to_json().replace(b'"Enqueued"', b'"Teleported"')[:-1] + b',"planet":{"name":"Mars"}}'
    assert from_json(LeaseEvent, newer).type == "Teleported"


def test_every_event_tells_the_depth_right_after_it(queue: LeaseQueue, clock: FakeClock) -> None:
    lively(queue, clock)
    pending: set[int] = set()
    active: set[int] = set()
    for event in log(queue):
        item = event.sequence_id or 0
        pending.discard(item)
        active.discard(item)
        if event.type in ("LeaseGranted", "Heartbeat"):
            active.add(item)
        elif event.type in ("Enqueued", "Released") or (
            event.type in ("Failed", "Expired", "Restored") and event.requeued
        ):
            pending.add(item)
        assert (event.type, event.pending, event.active) == (event.type, len(pending), len(active))
    assert (queue.stats().pending, queue.stats().active) == (len(pending), len(active))


def test_every_event_of_an_item_names_it(queue: LeaseQueue, clock: FakeClock) -> None:
    lively(queue, clock)
    named = [event for event in log(queue) if event.type != "Heartbeat"]
    assert all(event.item is not None for event in named)
    assert {(event.sequence_id, event.item.resource_id) for event in named if event.item} == {
        (n, str(n)) for n in range(1, 8)
    }


def test_later_events_leave_the_body_out(queue: LeaseQueue) -> None:
    queue.enqueue(work(body=b"large", attributes={"k": "v"}, partition_key="p"))
    queue.complete(one(queue))
    entered, *later = log(queue)
    assert entered.item == work(body=b"large", attributes={"k": "v"}, partition_key="p")
    assert [event.item for event in later] == [work(partition_key="p")] * 2


def test_names_and_partitions_of_a_batch_are_told_apart(queue: LeaseQueue) -> None:
    batch = [work("a", partition_key="p"), work("a"), work("b", partition_key="p"), work("b", partition_key="q")]
    queue.enqueue(batch)
    queue.complete(queue.lease("worker", 4))
    assert [event.item for event in log(queue)] == batch * 3


@pytest.mark.parametrize("priorities", [(0, 0, 0, 0, 0), (0, 1, 2, 3, 4), (1, 0, 1, 0, 1)])
def test_each_token_in_the_log_is_the_one_handed_out(queue: LeaseQueue, priorities: tuple[int, ...]) -> None:
    queue.enqueue([work(str(number), priority=number) for number in priorities])
    leases = queue.lease("worker", 5)
    queue.heartbeat([leases[4], leases[1]])
    queue.complete([leases[3], leases[0]])
    given = {lease.token.sequence_id: lease.token for lease in leases}
    assert all(event.token == given[event.sequence_id or 0] for event in log(queue) if event.type != "Enqueued")


def test_a_refused_operation_logs_nothing(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    lease = one(queue)
    queue.release(lease)
    head = queue.stats().head
    queue.complete(lease)
    queue.heartbeat(lease)
    assert types(queue, after=head) == []


def test_namespaces_have_logs_of_their_own(open_queue: OpenQueue) -> None:
    first, second = open_queue("first"), open_queue("second")
    first.enqueue(works(2))
    second.enqueue(works(3))
    first.complete(first.lease("worker", 1))
    assert types(first) == ["Enqueued", "Enqueued", "LeaseGranted", "Completed"]
    assert types(second) == ["Enqueued"] * 3
    assert [event.sequence_number for event in log(second)] == [1, 2, 3]


def test_queues_in_one_database_are_independent(shared_backend: Backend, open_queue: OpenQueue) -> None:
    first = open_queue("first", high_watermark=2, exclusive="resource")
    second = open_queue("second")
    assert first.queue_id != second.queue_id
    second.enqueue([work("a"), work("a"), work("a")])
    assert len(second.lease("worker", 9)) == 3
    assert not second.stats().backpressure
    assert (first.stats().pending, first.lease("worker"), first.leases()) == (0, [], [])
    assert second.release_owner("worker") == 3
    first.enqueue(work("b"))
    assert len(first.drain()) == 1
    assert second.stats().pending == 3


def test_two_openers_of_one_queue_see_the_same_log(shared_backend: Backend, open_queue: OpenQueue) -> None:
    first, second = open_queue(), open_queue()
    assert first.queue_id == second.queue_id
    first.enqueue(works(2))
    leases = second.lease("worker", 2)
    assert not first.complete(leases[0]).refused
    assert not second.complete(leases[1]).refused
    assert log(first) == log(second)
    assert first.stats() == second.stats()
