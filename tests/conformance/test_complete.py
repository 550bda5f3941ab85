"""Completing is for good, can be repeated, and can be all or nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lease_core import LeaseQueue, LeaseToken
from lease_core.errors import InvalidInput
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import log, nothing_changes, one, state, tokens, types, work, works

RESULTS: dict[str, Any] = {
    "nothing": None,
    "object": {"uri": "s3://out/1", "rows": 3, "nested": {"deep": [1, None]}},
    "text": "s3://out/1",
    "empty text": "",
    "zero": 0,
    "false": False,
    "empty object": {},
    "number": -1.5,
    "large numbers": [2**53 + 1, 2**64 - 1, -(2**63)],
    "unicode": "ü🚀\u0000",
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_result_is_any_json_value(queue: LeaseQueue, result: Any) -> None:
    queue.enqueue(works(2))
    queue.complete(queue.lease("worker", 2), [result, result])
    assert [status.result for status in queue.inspect([1, 2])] == [result, result]
    assert [event.result for event in log(queue)[-2:]] == [result, result]


def test_each_token_can_have_a_result_of_its_own(queue: LeaseQueue) -> None:
    queue.enqueue(works(4))
    a, b, c, d = queue.lease("worker", 4)
    queue.complete([c, a, d, b], result=["C", "A", None, {"b": [2]}])
    assert [status.result for status in queue.inspect(range(1, 5))] == ["A", {"b": [2]}, "C", None]
    assert {event.sequence_id: event.result for event in log(queue)[-4:]} == {1: "A", 2: {"b": [2]}, 3: "C", 4: None}


def test_a_list_as_the_result_of_one_token_is_given_in_a_list(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    queue.complete(one(queue), result=[[1, 2, 3]])
    assert queue.inspect(1)[0].result == [1, 2, 3]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_results_is_refused(queue: LeaseQueue, number: int) -> None:
    queue.enqueue(works(2))
    leases = queue.lease("worker", 2)
    with nothing_changes(queue), pytest.raises(InvalidInput, match="result"):
        queue.complete(leases, result=["x"] * number)


def test_a_completed_item_is_never_leased_again(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    queue.complete(one(queue))
    clock.advance(3_600)
    assert queue.lease("worker") == []
    assert queue.sweep().expired == 0


def test_completion_is_recorded_with_time_owner_and_token(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    lease = one(queue, "worker")
    clock.advance(2)
    queue.complete(lease, principal="alice")
    [status] = queue.inspect(1)
    assert (status.state, status.finished_at, status.token) == ("completed", clock.now(), lease.token)
    event = log(queue)[-1]
    assert (event.type, event.token, event.peer_id) == ("Completed", lease.token, "worker")
    assert (event.principal, event.timestamp, event.active) == ("alice", clock.now(), 0)


def test_a_repeated_complete_is_accepted_again_and_changes_nothing(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    leases = queue.lease("worker", 3)
    queue.complete(leases, result="first")
    clock.advance(3_600)
    with nothing_changes(queue):
        assert queue.complete(leases, result="second").accepted == tuple(tokens(leases))
    assert queue.inspect(2)[0].result == "first"


def test_a_repeated_complete_is_accepted_until_the_item_is_forgotten(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=100)
    queue.enqueue(work())
    lease = one(queue)
    queue.complete(lease)
    clock.advance(101)
    assert not queue.complete(lease).refused
    queue.sweep()
    assert [each.code for each in queue.complete(lease).refused] == ["resourcelease.unknown_item"]


def test_a_half_repeated_complete_finishes_the_rest(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    leases = queue.lease("worker", 3)
    queue.complete(leases[1])
    head = queue.stats().head
    assert not queue.complete(leases).refused
    assert [event.sequence_id for event in log(queue, after=head)] == [1, 3]


def test_an_atomic_complete_of_good_tokens_is_accepted(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    leases = queue.lease("worker", 3)
    assert queue.complete(leases, atomic=True).accepted == tuple(tokens(leases))
    assert queue.stats().completed == 3


@pytest.mark.parametrize("kind", ["forged", "unknown", "stale", "expired", "failed"])
def test_an_atomic_complete_with_one_bad_token_refuses_all(queue: LeaseQueue, clock: FakeClock, kind: str) -> None:
    queue.enqueue(works(4))
    bad = one(queue, duration=10).token
    code = "resourcelease.stale_token"
    match kind:
        case "forged":
            bad = LeaseToken(bad.sequence_id, bad.attempt, "forged", bad.fence)
        case "unknown":
            bad, code = LeaseToken(50, 1, bad.lease_id, bad.fence), "resourcelease.unknown_item"
        case "stale":
            queue.release(bad)
            assert len(queue.lease("other", 10)) == 4
            queue.release_owner("other")
        case "expired":
            clock.advance(10)
            code = "resourcelease.lease_expired"
        case "failed":
            queue.fail(bad, "broken")
    clock.advance(0.001)
    good = tokens(lease for lease in queue.lease("worker", 3) if lease.token.sequence_id != bad.sequence_id)
    given = [good[0], bad, *good[1:]]
    with nothing_changes(queue):
        result = queue.complete(given, atomic=True)
    assert result.accepted == ()
    assert [each.token for each in result.refused] == given
    assert [each.code for each in result.refused].count("resourcelease.batch_refused") == len(good)
    assert result.refused[1].code == code


def test_an_atomic_complete_can_be_repeated(queue: LeaseQueue) -> None:
    queue.enqueue(works(3))
    leases = queue.lease("worker", 3)
    queue.complete(leases[:2], atomic=True)
    assert not queue.complete(leases, atomic=True).refused
    with nothing_changes(queue):
        assert not queue.complete(leases, atomic=True).refused


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_can_be_completed_in_any_order_and_any_portions(queue: LeaseQueue, seed: int) -> None:
    dice = random.Random(seed)
    queue.enqueue(works(40))
    leases = queue.lease("worker", 40)
    dice.shuffle(leases)
    done: set[int] = set()
    while leases:
        portion, leases = leases[: (size := dice.randint(1, 9))], leases[size:]
        numbers = [lease.token.sequence_id for lease in portion]
        assert not queue.complete(portion, result=numbers).refused
        done |= set(numbers)
        assert {n for n in range(1, 41) if state(queue, n) == "completed"} == done
    assert [status.result for status in queue.inspect(range(1, 41))] == list(range(1, 41))
    assert types(queue).count("Completed") == 40
    assert queue.stats().active == 0
