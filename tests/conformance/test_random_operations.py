"""Random operations on random parts of batches: the queue, a plain model and the log must agree at every step.

Spans are cut and joined all the time here, so a mistake in cutting shows as an item in the wrong state.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from lease_core import LeaseQueue, LeaseToken
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.model import PlainQueue
from tests.conformance.replay import replay
from tests.conformance.vocabulary import log, work

MAX_ATTEMPTS = 3
SECOND = 1_000_000


class Pair:
    """The queue and its model, driven by the same dice."""

    def __init__(self, queue: LeaseQueue, clock: FakeClock, seed: int) -> None:
        self.queue, self.clock = queue, clock
        self.model = PlainQueue(clock, MAX_ATTEMPTS)
        self.dice = random.Random(seed)
        self.tokens: list[LeaseToken] = []
        self.drained: list[Any] = []

    def step(self) -> None:
        moves = {self.enqueue: 8, self.lease: 10, self.acknowledge: 18, self.pass_time: 5, self.sweep: 1}
        moves |= {self.drain: 1, self.restore: 2, self.requeue: 1, self.purge: 1}
        self.dice.choices(list(moves), list(moves.values()))[0]()
        self.compare()

    def enqueue(self) -> None:
        priority, delay = self.dice.choice([0, 0, 0, 1]), self.dice.choice([0, 0, 0, 4])
        count = self.dice.randint(1, 8)
        not_before = self.clock.now(delay) if delay else None
        for receipt in self.queue.enqueue([work(priority=priority, not_before=not_before)] * count):
            self.model.enqueue(receipt.sequence_id, priority, delay * SECOND)

    def lease(self) -> None:
        limit, duration = self.dice.randint(1, 12), self.dice.choice([3, 10])
        leases = self.queue.lease("worker", limit, duration=duration)
        assert [lease.token.sequence_id for lease in leases] == self.model.next(limit)
        for lease in leases:
            self.model.granted(lease.token, duration * SECOND)
        self.tokens += [lease.token for lease in leases]

    def acknowledge(self) -> None:
        recent = self.tokens[-30:]
        chosen = self.dice.sample(recent, self.dice.randint(0, min(len(recent), 10)))
        command = self.dice.choice(["heartbeat", "complete", "complete", "fail", "release"])
        delay = self.dice.choice([0, 2])
        match command:
            case "heartbeat":
                result = self.queue.heartbeat(chosen, duration=10)
            case "complete":
                result = self.queue.complete(chosen, result=[t.sequence_id for t in chosen])
            case "fail":
                result = self.queue.fail(chosen, "broken", delay=delay)
            case _:
                result = self.queue.release(chosen)
        expected = {t: self.model.acknowledge(command, t, 10 * SECOND, delay * SECOND) for t in chosen}
        assert result.accepted == tuple(t for t in chosen if expected[t] == "accepted")
        codes = {refusal.token: refusal.code.removeprefix("resourcelease.") for refusal in result.refused}
        assert codes == {t: code for t, code in expected.items() if code != "accepted"}

    def pass_time(self) -> None:
        self.clock.advance(self.dice.choice([0.000_001, 1, 2, 5]))

    def sweep(self) -> None:
        before = self.model.count("leased")
        self.model.expire()
        assert self.queue.sweep().expired == before - self.model.count("leased")

    def drain(self) -> None:
        items = self.queue.drain()
        assert {item.sequence_id for item in items} == self.model.drain()
        self.drained += items

    def restore(self) -> None:
        chosen = self.dice.sample(self.drained, self.dice.randint(0, len(self.drained)))
        self.queue.restore(chosen)
        self.model.restore(item.sequence_id for item in chosen)

    def requeue(self) -> None:
        ids = self.some_ids()
        assert self.queue.requeue_dead(ids) == self.model.requeue_dead(ids)

    def purge(self) -> None:
        ids = self.some_ids()
        assert self.queue.purge_dead(ids) == self.model.purge_dead(ids)
        self.drained = [item for item in self.drained if item.sequence_id in self.model.items]

    def some_ids(self) -> list[int]:
        highest = max(self.model.items, default=1)
        return self.dice.sample(range(1, highest + 1), self.dice.randint(0, min(highest, 12)))

    def compare(self) -> None:
        model, stats = self.model, self.queue.stats()
        pending = [item for item in model.items.values() if item.state == "pending"]
        delayed = [item for item in pending if item.available > self.clock.micros]
        ready = [item.available for item in pending if item.available <= self.clock.micros]
        assert (stats.pending, stats.active, stats.delayed) == (len(pending), model.count("leased"), len(delayed))
        assert (stats.dead, stats.completed) == (model.count("dead"), model.completed)
        age = (self.clock.micros - min(ready)) / SECOND if ready else None
        assert stats.oldest_pending_age == age
        known = self.queue.inspect(range(1, max(model.items, default=1) + 1))
        assert {s.sequence_id: (s.state, s.attempt, s.token) for s in known} == {
            i: (item.state, item.attempt, item.token) for i, item in model.items.items()
        }

    def compare_with_the_log(self) -> None:
        events = log(self.queue)
        assert [event.sequence_number for event in events] == list(range(1, self.queue.stats().head + 1))
        told = replay(events)
        highest = max(told, default=1)
        assert {i: each.status() for i, each in told.items()} == {
            status.sequence_id: status for status in self.queue.inspect(range(1, highest + 1))
        }
        leased = {i for i, each in told.items() if each.state == "leased"}
        assert {lease.token.sequence_id for lease in self.queue.leases()} == leased
        for listing, state in ((self.queue.dead_letters, "dead"), (self.queue.drained, "drained")):
            assert [each.sequence_id for each in listing()] == sorted(i for i, t in told.items() if t.state == state)


@pytest.mark.parametrize("seed", range(8))
def test_queue_model_and_log_agree_whatever_happens(open_queue: OpenQueue, clock: FakeClock, seed: int) -> None:
    pair = Pair(open_queue(max_attempts=MAX_ATTEMPTS), clock, seed)
    for _ in range(80):
        pair.step()
    pair.compare_with_the_log()
    told = Counter(event.type for event in log(pair.queue))
    assert len(told) >= 7, f"the dice did too little: {told}"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exclusive", ["resource", "partition"])
def test_exclusivity_holds_whatever_happens(open_queue: OpenQueue, clock: FakeClock, exclusive: str, seed: int) -> None:
    queue = open_queue(exclusive=exclusive, max_attempts=MAX_ATTEMPTS)
    dice = random.Random(seed)
    tokens: list[LeaseToken] = []
    keys = "abcd"
    for _ in range(60):
        match dice.choices(["enqueue", "lease", "complete", "fail", "release", "time"], [3, 5, 3, 2, 2, 3])[0]:
            case "enqueue":
                chosen = dice.choices(keys, k=dice.randint(1, 4))
                queue.enqueue([work(key, partition_key=key, priority=dice.choice([0, 1])) for key in chosen])
            case "lease":
                leases = queue.lease("worker", dice.randint(1, 3), duration=5)
                tokens += [lease.token for lease in leases]
                _first_of_their_keys(queue, leases)
            case "complete":
                queue.complete(dice.sample(tokens[-6:], min(2, len(tokens[-6:]))))
            case "fail":
                queue.fail(dice.sample(tokens[-6:], min(1, len(tokens[-6:]))), "broken", delay=dice.choice([0, 3]))
            case "release":
                queue.release(dice.sample(tokens[-6:], min(1, len(tokens[-6:]))))
            case "time":
                clock.advance(dice.choice([0.5, 3]))
        held = [lease.item.resource_id for lease in queue.leases()]
        assert len(held) == len(set(held)), "two leases on one key"
    queue.sweep()
    queue.lease("greedy", 100)
    _nobody_starves(queue, clock)


def _first_of_their_keys(queue: LeaseQueue, leases: list[Any]) -> None:
    known = queue.inspect(range(1, 200))
    for lease in leases:
        ahead = [
            status.sequence_id
            for status in known
            if status.item.resource_id == lease.item.resource_id
            and status.sequence_id < lease.token.sequence_id
            and status.state in ("pending", "leased")
        ]
        assert not ahead, f"{lease.token.sequence_id} was leased before {ahead}"


def _nobody_starves(queue: LeaseQueue, clock: FakeClock) -> None:
    """After a greedy lease every key that has work is either being worked on, or waits for its first item's time."""
    firsts: dict[str, Any] = {}
    for status in queue.inspect(range(1, 200)):
        if status.state in ("pending", "leased"):
            firsts.setdefault(status.item.resource_id, status)
    for first in firsts.values():
        assert first.state == "leased" or (first.available_at and first.available_at > clock.now()), first
