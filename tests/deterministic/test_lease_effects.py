"""``lease.effects``: effects of a leased item, which a holder that has lost its lease can neither begin nor record."""

from __future__ import annotations

import copy
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lease_core import Lease, LeaseError, LeaseLost, LeaseQueue, QueueConfig, WorkItem
from lease_core.deterministic import EffectStore, Fence, RecordedFailure, StaleFence, StateStore
from lease_core.errors import InvalidInput
from lease_core.model import from_json
from tests.conformance.clock import FakeClock
from tests.deterministic import workers
from tests.deterministic.conftest import state_url
from tests.kills.forks import context, running

Open = Callable[..., LeaseQueue]


def never() -> Any:
    raise AssertionError("this effect must not run")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(
    params=[
        "sqlite-own",
        "memory-own",
        "postgres-own",
        "sqlite-files",
        "memory-redis",
        "sqlite-sqlite",
        "memory-postgres",
    ]
)
def open_queue(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Iterator[Open]:
    """Opens queues on a database that keep their effects in it, or elsewhere."""
    database, effects = request.param.split("-")
    url = {
        "sqlite": lambda: f"sqlite:///{tmp_path / 'queue.db'}",
        "memory": lambda: "sqlite://",
        "postgres": lambda: request.getfixturevalue("deterministic_postgres"),
    }[database]()
    state = None if effects == "own" else StateStore.open(state_url(effects, request, tmp_path))
    opened: list[LeaseQueue] = []

    def open_(**config: Any) -> LeaseQueue:
        namespace = f"effects-{uuid.uuid4().hex[:8]}"
        opened.append(LeaseQueue.open(url, namespace, QueueConfig(**config), clock=clock, effects=state))
        return opened[-1]

    yield open_
    for queue in opened:
        queue.close()
    if state is not None:
        state.close()


@pytest.fixture
def queue(open_queue: Open) -> LeaseQueue:
    queue = open_queue(lease_duration=30, retry_delay=0)
    queue.enqueue([WorkItem("invoice", "17"), WorkItem("invoice", "18")])
    return queue


def take_over(queue: LeaseQueue, clock: FakeClock) -> Lease:
    """Let leases run out, and lease the first item anew."""
    clock.advance(31)
    return min(queue.lease("second", 2), key=lambda lease: lease.token.sequence_id)


def test_an_effect_is_recorded_per_item_and_name(queue: LeaseQueue) -> None:
    one, two = queue.lease("first", 2)
    assert one.effects.run_once("charge", lambda: 17) == 17
    assert one.effects.run_once("charge", never) == 17
    assert one.effects.run_once("mail", lambda: "sent") == "sent"
    assert two.effects.run_once("charge", lambda: 18) == 18
    assert one.effects.id("charge") == f"{queue.queue_id}/charge/seq/1"
    queue.complete([one, two]).raise_if_refused()


def test_the_next_attempt_gets_what_the_last_one_recorded(queue: LeaseQueue) -> None:
    [lease] = queue.lease("first")
    assert lease.effects.run_once("charge", lambda: "once") == "once"
    queue.fail(lease, "something after it went wrong", delay=0)
    again = next(each for each in queue.lease("second", 2) if each.token.sequence_id == 1)
    assert again.token.attempt == 2
    assert again.effects.run_once("charge", never) == "once"


def test_a_zombie_cannot_begin(queue: LeaseQueue, clock: FakeClock) -> None:
    [zombie] = queue.lease("first")
    take_over(queue, clock)
    with pytest.raises(StaleFence) as caught:
        zombie.effects.run_once("charge", never)
    assert isinstance(caught.value, LeaseLost)


def test_nor_can_one_whose_item_nobody_has_taken_over_yet(queue: LeaseQueue, clock: FakeClock) -> None:
    [zombie] = queue.lease("first")
    clock.advance(30)
    with pytest.raises(StaleFence, match="expired"):
        zombie.effects.run_once("charge", never)


def test_a_zombie_that_had_begun_cannot_record(queue: LeaseQueue, clock: FakeClock) -> None:
    [zombie] = queue.lease("first")
    holders: list[Lease] = []

    def effect() -> str:
        holders.append(take_over(queue, clock))
        return "zombie"

    with pytest.raises(StaleFence):
        zombie.effects.run_once("charge", effect)
    assert holders[0].effects.run_once("charge", lambda: "holder") == "holder"


def test_a_zombies_failure_is_not_recorded_either(queue: LeaseQueue, clock: FakeClock) -> None:
    [zombie] = queue.lease("first")

    def effect() -> str:
        take_over(queue, clock)
        raise ValueError("zombie")

    with pytest.raises(StaleFence):
        zombie.effects.run_once("charge", effect, record_failures=True)
    assert EffectStore(zombie.effects._effects.store).recorded(zombie.effects.id("charge")) is None  # type: ignore[attr-defined]


def test_a_zombie_gets_what_the_holder_recorded(queue: LeaseQueue, clock: FakeClock) -> None:
    [zombie] = queue.lease("first")
    take_over(queue, clock).effects.run_once("charge", lambda: "holder")
    assert zombie.effects.run_once("charge", never) == "holder"
    with pytest.raises(StaleFence):
        zombie.effects.run_once("mail", never)


def test_what_the_last_holder_recorded_at_the_last_moment_is_found(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking for a record and claiming the item, its last holder may still have recorded."""
    with LeaseQueue.open("sqlite://", clock=clock) as queue, StateStore.open("sqlite://") as store:
        queue.enqueue(WorkItem("invoice", "17"))
        zombie = from_json(Lease, queue.lease("first")[0].to_json())
        holder = from_json(Lease, take_over(queue, clock).to_json())
        effects, claim = EffectStore(store), store.claim

        def recorded_just_before(fence: Fence) -> None:
            monkeypatch.setattr(store, "claim", claim)
            assert effects.run_once("charge", lambda: "at the last moment", lease=zombie) == "at the last moment"
            claim(fence)

        monkeypatch.setattr(store, "claim", recorded_just_before)
        assert effects.run_once("charge", never, lease=holder) == "at the last moment"


@pytest.mark.parametrize("end", ["complete", "release", "fail"])
def test_after_the_lease_has_ended_nothing_is_recorded(queue: LeaseQueue, end: str) -> None:
    [lease] = queue.lease("first")
    ends: dict[str, Callable[[], Any]] = {
        "complete": lambda: queue.complete(lease),
        "release": lambda: queue.release(lease),
        "fail": lambda: queue.fail(lease, "broken"),
    }
    ends[end]().raise_if_refused()
    with pytest.raises(StaleFence):
        lease.effects.run_once("charge", never)


def test_a_heartbeat_keeps_the_right_to_record(queue: LeaseQueue, clock: FakeClock) -> None:
    [lease] = queue.lease("first")

    def effect() -> str:
        for _ in range(3):
            clock.advance(29)
            queue.heartbeat(lease).raise_if_refused()
        return "slow"

    assert lease.effects.run_once("charge", effect) == "slow"


def test_failures_can_be_recorded(queue: LeaseQueue) -> None:
    [lease] = queue.lease("first")
    with pytest.raises(ValueError, match="declined"):
        lease.effects.run_once("charge", _declined, record_failures=ValueError)
    with pytest.raises(RecordedFailure, match="declined"):
        lease.effects.run_once("charge", never)


def _declined() -> None:
    raise ValueError("card declined")


def test_queues_are_apart(open_queue: Open) -> None:
    for number in range(2):
        queue = open_queue()
        queue.enqueue(WorkItem("invoice", "17"))
        [lease] = queue.lease("worker")
        assert lease.token.sequence_id == 1
        assert lease.effects.run_once("charge", lambda number=number: number) == number


def test_recording_leaves_the_queue_as_it_was(queue: LeaseQueue) -> None:
    [lease] = queue.lease("first")
    before = queue.events(), queue.stats()
    lease.effects.run_once("charge", lambda: 1)
    assert (queue.events(), queue.stats()) == before


# Leases that do not know their queue


def test_a_lease_is_the_same_value_with_and_without_its_queue(queue: LeaseQueue) -> None:
    [lease] = queue.lease("first")
    read = from_json(Lease, lease.to_json())
    assert read == lease
    assert read.origin is None
    assert copy.copy(lease) == lease


def test_a_lease_that_does_not_know_its_queue_says_what_to_do(queue: LeaseQueue) -> None:
    [lease] = queue.lease("first")
    read = from_json(Lease, lease.to_json())
    with pytest.raises(LeaseError, match=r"EffectStore\.run_once"):
        _ = read.effects


def test_its_fence_is_still_held_against_those_seen(clock: FakeClock, effects: EffectStore, name: str) -> None:
    with LeaseQueue.open("sqlite://", clock=clock) as queue:
        queue.enqueue(WorkItem("invoice", "17"))
        zombie = from_json(Lease, queue.lease("first")[0].to_json())
        if effects.store.checks_tokens:
            with pytest.raises(InvalidInput, match="not of this queue"):
                effects.run_once(name, never, lease=zombie)
            return

        def effect() -> str:
            holder = from_json(Lease, take_over(queue, clock).to_json())
            with pytest.raises(ZeroDivisionError):  # the next holder has begun, that is enough
                effects.run_once(name, lambda: 1 / 0, lease=holder)
            return "zombie"

        with pytest.raises(StaleFence):
            effects.run_once(name, effect, lease=zombie)
        assert effects.recorded(name) is None


def test_a_lease_of_another_queue_is_refused_by_a_queues_own_store() -> None:
    with LeaseQueue.open("sqlite://", "one") as one, LeaseQueue.open("sqlite://", "two") as two:
        for queue in (one, two):
            queue.enqueue(WorkItem("invoice", "17"))
        [ours], [theirs] = one.lease("worker"), two.lease("worker")
        with pytest.raises(InvalidInput, match="not of this queue"):
            ours.effects._effects.run_once("charge", never, lease=theirs)  # type: ignore[attr-defined]


def test_what_is_no_lease_is_refused(effects: EffectStore, name: str) -> None:
    with pytest.raises(InvalidInput, match="lease"):
        effects.run_once(name, never, lease="lease")  # type: ignore[arg-type]


def test_an_address_is_not_a_store() -> None:
    with pytest.raises(InvalidInput, match=r"StateStore\.open"):
        LeaseQueue.open("sqlite://", effects="redis://localhost")  # type: ignore[arg-type]


# A real zombie


@pytest.mark.parametrize(
    ("database", "effects"), [("sqlite", None), ("postgres", None), ("sqlite", "files"), ("sqlite", "redis")]
)
def test_a_process_that_was_stopped_cannot_record(
    request: pytest.FixtureRequest, tmp_path: Path, database: str, effects: str | None, name: str
) -> None:
    url = state_url(database, request, tmp_path)
    state = state_url(effects, request, tmp_path) if effects else None
    store = StateStore.open(state) if state else None
    with LeaseQueue.open(url, name, QueueConfig(lease_duration=1), effects=store) as queue:
        queue.enqueue(WorkItem("invoice", "17"))
        ours, theirs = context.Pipe()
        with running(workers.work_as_zombie, url, name, state, 1.0, theirs) as zombie:
            assert zombie.pid is not None
            assert ours.poll(30)
            assert ours.recv() == "begun"
            os.kill(zombie.pid, signal.SIGSTOP)
            [holder] = queue.lease("holder", wait=30, duration=60)
            assert holder.effects.run_once("charge", lambda: "holder") == "holder"
            os.kill(zombie.pid, signal.SIGCONT)
            ours.send("go on")
            assert ours.poll(30)
            assert ours.recv() == StaleFence.code
        assert holder.effects.run_once("charge", never) == "holder"
    if store is not None:
        store.close()
