"""Only the current token moves an item; every other is refused with the reason and changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lease_core import AckResult, LeaseQueue, LeaseToken
from lease_core.errors import LeaseRefused
from tests.conformance.clock import MICRO, FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import log, nothing_changes, one, state, tokens, types, work, works

Acknowledge = Callable[[LeaseQueue, object], AckResult]

ACKNOWLEDGE: dict[str, Acknowledge] = {
    "heartbeat": lambda queue, given: queue.heartbeat(given),  # type: ignore[arg-type]
    "complete": lambda queue, given: queue.complete(given, result="mine"),  # type: ignore[arg-type]
    "fail": lambda queue, given: queue.fail(given, "broken"),  # type: ignore[arg-type]
    "release": lambda queue, given: queue.release(given),  # type: ignore[arg-type]
}
every_acknowledgement = pytest.mark.parametrize("acknowledge", ACKNOWLEDGE.values(), ids=ACKNOWLEDGE)

STALE, EXPIRED, UNKNOWN = (f"resourcelease.{code}" for code in ("stale_token", "lease_expired", "unknown_item"))

FORGERIES: dict[str, tuple[Callable[[LeaseToken], LeaseToken], str]] = {
    "other lease id": (lambda t: LeaseToken(t.sequence_id, t.attempt, "f" * 32, t.fence), STALE),
    "blank lease id": (lambda t: LeaseToken(t.sequence_id, t.attempt, "", t.fence), STALE),
    "lease id in capitals": (lambda t: LeaseToken(t.sequence_id, t.attempt, t.lease_id.upper() + "A", t.fence), STALE),
    "next attempt": (lambda t: LeaseToken(t.sequence_id, t.attempt + 1, t.lease_id, t.fence), STALE),
    "attempt zero": (lambda t: LeaseToken(t.sequence_id, 0, t.lease_id, t.fence), STALE),
    "higher fence": (lambda t: LeaseToken(t.sequence_id, t.attempt, t.lease_id, t.fence + 1), STALE),
    "no fence": (lambda t: LeaseToken(t.sequence_id, t.attempt, t.lease_id, 0), STALE),
    "neighbour's item": (lambda t: LeaseToken(t.sequence_id + 1, t.attempt, t.lease_id, t.fence), STALE),
    "item never leased": (lambda t: LeaseToken(3, t.attempt, t.lease_id, t.fence), STALE),
    "item never enqueued": (lambda t: LeaseToken(99, t.attempt, t.lease_id, t.fence), UNKNOWN),
    "item zero": (lambda t: LeaseToken(0, t.attempt, t.lease_id, t.fence), UNKNOWN),
    "largest numbers": (lambda t: LeaseToken(2**63 - 1, 2**63 - 1, t.lease_id, 2**63 - 1), UNKNOWN),
}


def refusal(result: AckResult) -> str:
    """The code of the one refusal; everything about it must be in order."""
    assert result.accepted == ()
    [refused] = result.refused
    assert refused.reason
    return refused.code


@every_acknowledgement
def test_a_forged_token_changes_nothing(queue: LeaseQueue, acknowledge: Acknowledge) -> None:
    queue.enqueue(works(3))
    lease, _ = queue.lease("worker", 2)
    with nothing_changes(queue):
        for kind, (forge, code) in FORGERIES.items():
            forged = forge(lease.token)
            result = acknowledge(queue, forged)
            assert (refusal(result), result.refused[0].token) == (code, forged), kind


@every_acknowledgement
@pytest.mark.parametrize("late", [0, 3_600])
@pytest.mark.parametrize("swept", [False, True], ids=["unswept", "swept"])
def test_an_expired_token_changes_nothing_even_if_nobody_swept(
    queue: LeaseQueue, clock: FakeClock, acknowledge: Acknowledge, late: float, swept: bool
) -> None:
    queue.enqueue(work())
    lease = one(queue, duration=10)
    clock.advance(10 + late)
    if swept:
        queue.sweep()
    with nothing_changes(queue):
        assert refusal(acknowledge(queue, lease)) == EXPIRED


@every_acknowledgement
def test_a_token_is_good_until_the_very_last_moment(
    queue: LeaseQueue, clock: FakeClock, acknowledge: Acknowledge
) -> None:
    queue.enqueue(work())
    lease = one(queue, duration=10)
    clock.advance(10 - MICRO)
    assert acknowledge(queue, lease).accepted == (lease.token,)


@every_acknowledgement
@pytest.mark.parametrize("between", ["fail", "release", "expire"])
def test_a_token_of_an_earlier_attempt_changes_nothing(
    queue: LeaseQueue, clock: FakeClock, acknowledge: Acknowledge, between: str
) -> None:
    queue.enqueue(work())
    zombie = one(queue, "zombie", duration=10)
    match between:
        case "fail":
            queue.fail(zombie, "broken", delay=0)
        case "release":
            queue.release(zombie)
        case "expire":
            clock.advance(10)
    current = one(queue, "heir")
    with nothing_changes(queue):
        assert refusal(acknowledge(queue, zombie)) == STALE
    assert not queue.complete(current).refused


@every_acknowledgement
def test_a_token_of_another_queue_changes_nothing(open_queue: OpenQueue, acknowledge: Acknowledge) -> None:
    here, there = open_queue("here"), open_queue("there")
    here.enqueue(work())
    there.enqueue(work())
    foreign = one(there)
    one(here)
    with nothing_changes(here), nothing_changes(there):
        assert refusal(acknowledge(here, foreign)) == STALE


@pytest.mark.parametrize("end", ["complete", "fail", "dead", "release"])
@every_acknowledgement
def test_an_ended_lease_takes_no_other_ending(
    queue: LeaseQueue, acknowledge: Acknowledge, end: str, request: pytest.FixtureRequest
) -> None:
    queue.enqueue(work())
    lease = one(queue)
    match end:
        case "complete":
            queue.complete(lease)
        case "fail":
            queue.fail(lease, "broken")
        case "dead":
            queue.fail(lease, "broken", requeue=False)
        case "release":
            queue.release(lease)
    repeats = {"complete": "complete", "fail": "fail", "dead": "fail", "release": "release"}[end]
    with nothing_changes(queue):
        result = acknowledge(queue, lease)
    if acknowledge is ACKNOWLEDGE[repeats]:
        assert (result.accepted, result.refused) == ((lease.token,), ())
    else:
        assert refusal(result) == STALE


@every_acknowledgement
def test_the_token_of_an_item_requeued_from_the_dead_is_stale(queue: LeaseQueue, acknowledge: Acknowledge) -> None:
    queue.enqueue(work())
    lease = one(queue)
    queue.fail(lease, "broken", requeue=False)
    queue.requeue_dead(1)
    with nothing_changes(queue):
        assert refusal(acknowledge(queue, lease)) == STALE


@every_acknowledgement
def test_the_token_of_a_purged_item_is_unknown(queue: LeaseQueue, acknowledge: Acknowledge) -> None:
    queue.enqueue(work())
    lease = one(queue)
    queue.fail(lease, "broken", requeue=False)
    queue.purge_dead(1)
    with nothing_changes(queue):
        assert refusal(acknowledge(queue, lease)) == UNKNOWN


@every_acknowledgement
def test_in_a_mixed_batch_the_good_are_accepted_and_the_bad_are_named(
    queue: LeaseQueue, clock: FakeClock, acknowledge: Acknowledge
) -> None:
    queue.enqueue(works(5))
    [expired] = tokens(queue.lease("worker", duration=10))
    good = tokens(queue.lease("worker", 3, duration=60))
    clock.advance(10)
    forged = LeaseToken(good[1].sequence_id, good[1].attempt, "forged", good[1].fence)
    unknown = LeaseToken(77, 1, "x", 1)
    result = acknowledge(queue, [good[2], unknown, expired, good[0], forged])
    assert result.accepted == (good[2], good[0])
    assert [(each.token, each.code) for each in result.refused] == [
        (unknown, UNKNOWN),
        (expired, EXPIRED),
        (forged, STALE),
    ]
    assert state(queue, good[1].sequence_id) == "leased"
    assert state(queue, expired.sequence_id) == "leased"
    with pytest.raises(LeaseRefused) as raised:
        result.raise_if_refused()
    assert raised.value.refused == result.refused


@every_acknowledgement
def test_a_lease_a_token_or_any_iterable_of_either_will_do(queue: LeaseQueue, acknowledge: Acknowledge) -> None:
    queue.enqueue(works(6))
    leases = queue.lease("worker", 6)
    assert len(acknowledge(queue, leases[0]).accepted) == 1
    assert len(acknowledge(queue, leases[1].token).accepted) == 1
    assert len(acknowledge(queue, (each for each in (leases[2], leases[3].token))).accepted) == 2
    assert len(acknowledge(queue, tuple(leases[4:])).accepted) == 2


@every_acknowledgement
def test_no_tokens_do_nothing(queue: LeaseQueue, acknowledge: Acknowledge) -> None:
    queue.enqueue(work())
    with nothing_changes(queue):
        result = acknowledge(queue, [])
    assert (result.accepted, result.refused) == ((), ())


@pytest.mark.parametrize("name", ["complete", "fail", "release"])
def test_a_token_given_twice_in_one_call_counts_once(queue: LeaseQueue, name: str) -> None:
    queue.enqueue(works(2))
    first, second = tokens(queue.lease("worker", 2))
    head = queue.stats().head
    result = ACKNOWLEDGE[name](queue, [first, second, first])
    assert result.accepted == (first, second, first)
    assert len(types(queue, after=head)) == 2


def test_an_accepted_result_passes_through_raise_if_refused(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    result = queue.heartbeat(one(queue))
    assert result.raise_if_refused() is result


def test_the_fence_is_the_log_number_of_the_grant(queue: LeaseQueue) -> None:
    queue.enqueue([work("a"), work("b", priority=1), work("c")])
    leases = queue.lease("worker", 3)
    granted = {event.sequence_id: event.sequence_number for event in log(queue) if event.type == "LeaseGranted"}
    assert {lease.token.sequence_id: lease.token.fence for lease in leases} == granted


def test_fences_only_grow(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(3))
    seen: list[int] = []
    for turn in range(4):
        leases = queue.lease("worker", 3, duration=10)
        seen += sorted(lease.token.fence for lease in leases)
        match turn:
            case 0:
                queue.release(leases)
            case 1:
                queue.fail(leases, "broken", delay=0)
            case 2:
                clock.advance(10)
    assert len(seen) == 12
    assert seen == sorted(set(seen))


def test_the_result_tells_the_depth_afterwards(queue: LeaseQueue) -> None:
    queue.enqueue(works(5))
    leases = queue.lease("worker", 3)
    result = queue.release(leases[0])
    assert (result.pending, result.active) == (3, 2)


def test_a_heartbeat_prolongs_from_now(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    lease = one(queue)
    clock.advance(20)
    queue.heartbeat(lease)
    assert queue.leases()[0].expires_at == clock.now(30)
    clock.advance(29)
    assert not queue.complete(lease).refused


@pytest.mark.parametrize(("duration", "expected"), [(60.0, 60.0), (10.0, 30.0), (0.0, 30.0)])
def test_a_heartbeat_never_shortens_a_lease(
    queue: LeaseQueue, clock: FakeClock, duration: float, expected: float
) -> None:
    queue.enqueue(work())
    lease = one(queue)
    queue.heartbeat(lease, duration=duration)
    assert queue.inspect(1)[0].expires_at == clock.now(expected)
    assert queue.leases()[0].granted_at == lease.granted_at


def test_a_heartbeat_of_some_leaves_the_others_to_expire(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(5))
    leases = queue.lease("worker", 5, duration=10)
    clock.advance(5)
    queue.heartbeat([leases[1], leases[3]], duration=10)
    clock.advance(5)
    assert queue.sweep().expired == 3
    assert [state(queue, n) for n in range(1, 6)] == ["pending", "leased", "pending", "leased", "pending"]


def test_heartbeats_are_logged_with_the_new_expiry(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(works(2))
    leases = queue.lease("worker", 2)
    head = queue.stats().head
    clock.advance(1)
    queue.heartbeat(leases, principal="alice")
    events = log(queue, after=head)
    assert [(event.type, event.token, event.expires_at) for event in events] == [
        ("Heartbeat", lease.token, clock.now(30)) for lease in leases
    ]
    assert {event.principal for event in events} == {"alice"}
