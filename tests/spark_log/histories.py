"""Queues with a past: everything that can happen to an item, and every field that an event can have."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

from lease_core import BackpressureActive, LeaseQueue, WorkItem
from tests.conformance.clock import FakeClock

PEERS = ("alice", "bob", "carol")


def live(queue: LeaseQueue, clock: FakeClock, seed: int, steps: int = 60) -> None:
    """Random operations, many of them on parts of batches, so that entries of all lengths come to be."""
    dice = random.Random(seed)
    leases: list[Any] = []
    drained: list[Any] = []
    for step in range(steps):
        match dice.choices(
            [
                "enqueue",
                "lease",
                "heartbeat",
                "complete",
                "fail",
                "release",
                "wait",
                "sweep",
                "drain",
                "restore",
                "dead",
            ],
            [8, 12, 4, 8, 6, 3, 8, 2, 1, 2, 2],
        )[0]:
            case "enqueue":
                items = [_item(dice, step, n) for n in range(dice.choice([1, 2, 7, 40]))]
                peer, principal = dice.choice([None, "producer"]), dice.choice([None, "ünïcode"])
                with suppress(BackpressureActive):  # which is part of the history
                    queue.enqueue(items, peer_id=peer, principal=principal)
            case "lease":
                got = queue.lease(dice.choice(PEERS), dice.choice([1, 5, 25]), duration=10, principal="svc")
                leases += [lease.token for lease in got]
            case "heartbeat":
                queue.heartbeat(_some(dice, leases), duration=10)
            case "complete":
                chosen = _some(dice, leases)
                queue.complete(chosen, result=dice.choice([None, {"uri": "s3://ø"}, [*range(len(chosen))], "text"]))
            case "fail":
                queue.fail(_some(dice, leases), "Broken: 💥\n  line 2", requeue=dice.random() < 0.8, delay=1)
            case "release":
                queue.release(_some(dice, leases), principal="operator")
            case "wait":
                clock.advance(dice.choice([0.000_001, 0.5, 3, 11, 1800]))
            case "sweep":
                queue.sweep()
            case "drain":
                drained += queue.drain(limit=dice.choice([3, 50]))
            case "restore":
                queue.restore(dice.sample(drained, min(len(drained), dice.randint(0, 5))), principal="operator")
            case "dead":
                dead = [each.sequence_id for each in queue.dead_letters()]
                queue.requeue_dead(dead[::2])
                queue.purge_dead(dead[1:2])


def _item(dice: random.Random, step: int, n: int) -> WorkItem:
    return WorkItem(
        dice.choice(["file", "shard"]),
        f"s3://raw/{step % 9}/{n % 6}",
        partition_key=dice.choice([None, "eu", "us"]),
        attributes=dice.choice([{}, {"k": "v", "ключ": "значение"}]),
        body=dice.choice([b"", b"\x00\xff body"]),
        payload_encoding=dice.choice([None, "json"]),
        request_id=dice.choice([None, f"request-{step}-{n}"]),
        priority=dice.choice([0, 0, 5]),
    )


def _some(dice: random.Random, tokens: list[Any]) -> list[Any]:
    recent = tokens[-40:]
    start = dice.randint(0, max(len(recent) - 1, 0))
    return recent[start : start + dice.choice([1, 4, 20])]


def come_from_elsewhere(here: LeaseQueue, there: LeaseQueue, clock: FakeClock) -> None:
    """Items that failed in one queue and were restored in another: events with origin, history and backpressure."""
    there.enqueue([WorkItem("file", f"far/{n}") for n in range(4)])
    there.fail([lease.token for lease in there.lease("far", 3)], "Broken: far away", delay=0)
    there.fail([lease.token for lease in there.lease("far", 1)], "Given up", requeue=False)
    clock.advance(1)
    here.restore([*there.drain(), *there.dead_letters()], principal="operator")
