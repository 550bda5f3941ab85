"""Dead letters stay readable, can be requeued with all their attempts, or purged for good."""

from __future__ import annotations

import pytest

from lease_core import LeaseQueue
from lease_core.store.base import Query
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, log, nothing_changes, one, state, types, work, works


def bury(queue: LeaseQueue, count: int) -> None:
    """Enqueue items and dead-letter them together."""
    queue.enqueue(works(count))
    queue.fail(queue.lease("worker", count), "broken", requeue=False)


def letters(queue: LeaseQueue, **page: int) -> list[int]:
    return [letter.sequence_id for letter in queue.dead_letters(**page)]


def test_a_dead_letter_says_all_about_itself(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(max_attempts=2)
    queue.enqueue(work(body=b"b", request_id="r"))
    enqueued = clock.now()
    queue.fail(one(queue, "first"), "one", delay=0)
    clock.advance(1)
    lease = one(queue, "second")
    queue.fail(lease, "two")
    [letter] = queue.dead_letters()
    assert (letter.item, letter.sequence_id, letter.attempt) == (lease.item, 1, 2)
    assert (letter.enqueued_at, letter.last_error, letter.last_token) == (enqueued, "two", lease.token)
    assert letter.dead_lettered
    assert [(error.attempt, error.error, error.peer_id) for error in letter.errors] == [
        (1, "one", "first"),
        (2, "two", "second"),
    ]
    [status] = queue.inspect(1)
    assert (status.state, status.finished_at) == ("dead", clock.now())


@pytest.mark.parametrize(
    ("after", "limit", "expected"),
    [(0, 1_000, [1, 2, 4, 5, 6]), (0, 2, [1, 2]), (1, 2, [2, 4]), (2, 2, [4, 5]), (5, 2, [6]), (6, 2, []), (99, 2, [])],
)
def test_dead_letters_are_listed_page_by_page(queue: LeaseQueue, after: int, limit: int, expected: list[int]) -> None:
    queue.enqueue(works(7))
    leases = queue.lease("worker", 7)
    queue.complete([leases[2], leases[6]])
    queue.fail([leases[n] for n in (0, 1, 3, 4, 5)], "broken", requeue=False)
    assert letters(queue, after=after, limit=limit) == expected


def test_each_dead_letter_lists_its_own_errors_once(queue: LeaseQueue) -> None:
    queue.enqueue(works(6))
    queue.fail(queue.lease("worker", 6), "all", delay=0)
    leases = queue.lease("worker", 6)
    queue.complete(leases[2])
    queue.fail([leases[n] for n in (0, 1, 3, 5)], "some", requeue=False)
    queue.fail(leases[4], "one", requeue=False)
    history = {letter.sequence_id: [error.error for error in letter.errors] for letter in queue.dead_letters()}
    assert history == {n: ["all", "one" if n == 5 else "some"] for n in (1, 2, 4, 5, 6)}


def test_a_requeued_letter_has_all_its_attempts_again(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(max_attempts=2)
    queue.enqueue(work())
    for _ in range(2):
        queue.fail(one(queue), "broken", delay=0)
    clock.advance(5)
    assert queue.requeue_dead(1, principal="operator") == [1]
    assert (queue.stats().dead, queue.stats().pending) == (0, 1)
    event = log(queue)[-1]
    assert (event.type, event.requeued, event.principal) == ("Restored", True, "operator")
    assert (event.item, event.available_at, event.pending) == (work(), clock.now(), 1)
    for attempt in (1, 2):
        lease = one(queue)
        assert (lease.token.attempt, lease.last_error) == (attempt, "broken")
        queue.fail(lease, "broken", delay=0)
    assert len(queue.dead_letters()[0].errors) == 4


def test_a_requeued_letter_goes_behind_what_was_waiting(queue: LeaseQueue, clock: FakeClock) -> None:
    bury(queue, 2)
    queue.enqueue(work("3"))
    clock.advance(1)
    queue.requeue_dead([2, 1])
    assert ids(queue.lease("worker", 9)) == [3, 1, 2]


@pytest.mark.parametrize("chosen", [[1], [3], [5], [1, 2], [2, 4], [1, 2, 3, 4, 5]])
def test_any_of_the_dead_can_be_requeued(queue: LeaseQueue, chosen: list[int]) -> None:
    bury(queue, 5)
    assert queue.requeue_dead(chosen) == chosen
    assert letters(queue) == [n for n in range(1, 6) if n not in chosen]
    assert ids(queue.lease("worker", 9)) == chosen
    assert queue.stats().dead == 5 - len(chosen)


@pytest.mark.parametrize("chosen", [[1], [3], [5], [1, 2], [2, 4], [1, 2, 3, 4, 5]])
def test_any_of_the_dead_can_be_purged(queue: LeaseQueue, chosen: list[int]) -> None:
    bury(queue, 5)
    assert queue.purge_dead(chosen, principal="operator") == chosen
    assert [state(queue, n) for n in chosen] == [None] * len(chosen)
    assert letters(queue) == [n for n in range(1, 6) if n not in chosen]
    assert queue.stats().dead == 5 - len(chosen)
    purged = [event for event in log(queue) if event.type == "Purged"]
    assert [(event.sequence_id, event.principal) for event in purged] == [(n, "operator") for n in chosen]


def test_ids_may_be_given_as_letters_in_any_order_and_twice(queue: LeaseQueue) -> None:
    bury(queue, 3)
    found = queue.dead_letters()
    assert queue.requeue_dead([found[2], found[0], 3]) == [1, 3]
    assert queue.purge_dead(found) == [2]


@pytest.mark.parametrize("fate", ["pending", "leased", "completed", "drained", "unknown"])
def test_only_the_dead_are_requeued_or_purged(queue: LeaseQueue, fate: str) -> None:
    if fate != "unknown":
        queue.enqueue(work())
    match fate:
        case "leased":
            one(queue)
        case "completed":
            queue.complete(one(queue))
        case "drained":
            queue.drain()
    with nothing_changes(queue):
        assert queue.requeue_dead(1) == []
        assert queue.purge_dead([1, 2, 3]) == []
        assert queue.requeue_dead([]) == []


def test_requeue_and_purge_can_be_repeated(queue: LeaseQueue) -> None:
    bury(queue, 2)
    queue.requeue_dead(1)
    queue.purge_dead(2)
    with nothing_changes(queue):
        assert queue.requeue_dead([1, 2]) == []
        assert queue.purge_dead([1, 2]) == []


def test_a_purged_id_is_never_given_again(queue: LeaseQueue) -> None:
    bury(queue, 2)
    queue.purge_dead([1, 2])
    assert queue.enqueue(work())[0].sequence_id == 3


def test_the_dead_outlive_the_retention(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=10)
    bury(queue, 2)
    clock.advance(10**6)
    assert queue.sweep().forgotten == 0
    assert letters(queue) == [1, 2]


@pytest.mark.parametrize("portions", [[[1, 2, 3], [4, 5, 6]], [[2, 4], [1, 3], [5, 6]], [[6], [1], [2, 3, 4, 5]]])
def test_nothing_of_a_purged_item_stays_in_the_tables(queue: LeaseQueue, portions: list[list[int]]) -> None:
    queue.enqueue(works(6, request_id=None))
    queue.fail(queue.lease("worker", 6), "one", delay=0)
    queue.fail(queue.lease("worker", 6), "two", requeue=False)
    for portion in portions:
        queue.purge_dead(portion)
        assert [len(letter.errors) for letter in queue.dead_letters()] == [2] * len(queue.dead_letters())
    for table in ("item", "span", "error", "origin"):
        [rows] = queue._store.read(Query(f"SELECT count(*) FROM omnirelay_{table} WHERE ns = ?", (queue._ns,)))
        assert rows == [(0,)], table


def test_items_die_and_come_back_many_at_a_time(queue: LeaseQueue) -> None:
    bury(queue, 1_500)
    assert len(queue.dead_letters(limit=2_000)) == 1_500
    assert len(queue.requeue_dead(range(1, 1_501, 2))) == 750
    assert len(queue.purge_dead(range(1, 1_501))) == 750
    assert (queue.stats().pending, queue.stats().dead) == (750, 0)
    assert types(queue).count("Purged") == 750
