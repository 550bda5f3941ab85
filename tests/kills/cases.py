"""Every operation that writes, with what the log says once it happened. A process is killed at each point of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lease_core import LeaseQueue, QueueConfig, WorkItem
from tests.kills.workers import Death, open_queue

CONFIG = QueueConfig(lease_duration=60, retry_delay=0)
ITEMS = [WorkItem("file", name, request_id=name) for name in ("a", "b", "c")]


@dataclass(frozen=True)
class Case:
    """``prepare`` sets the scene and gives what ``act`` needs. ``repeatable``: doing it again changes nothing."""

    prepare: Callable[[LeaseQueue], Any]
    act: Callable[[LeaseQueue, Any], Any]
    events: list[str]
    repeatable: bool = True


def _nothing(_: LeaseQueue) -> None:
    pass


def _enqueued(queue: LeaseQueue) -> None:
    queue.enqueue(ITEMS)


def _leased(queue: LeaseQueue) -> Any:
    queue.enqueue(ITEMS)
    return [lease.token for lease in queue.lease("holder", limit=3)]


def _expired(queue: LeaseQueue) -> None:
    queue.enqueue(ITEMS)
    queue.lease("gone", limit=3, duration=0.001)
    time.sleep(0.01)


def _drained(queue: LeaseQueue) -> Any:
    queue.enqueue(ITEMS)
    return queue.drain()


def _dead(queue: LeaseQueue) -> Any:
    queue.enqueue(ITEMS)
    queue.fail(queue.lease("holder", limit=3), "hopeless", requeue=False)
    return [each.sequence_id for each in queue.dead_letters()]


def _lease(queue: LeaseQueue, _: Any) -> Any:
    return queue.lease("killed", limit=3)


CASES = {
    "enqueue": Case(_nothing, lambda queue, _: queue.enqueue(ITEMS), ["Enqueued"] * 3),
    "lease": Case(_enqueued, _lease, ["LeaseGranted"] * 3),
    "takeover": Case(_expired, _lease, ["Expired"] * 3 + ["LeaseGranted"] * 3),
    "heartbeat": Case(_leased, lambda queue, held: queue.heartbeat(held), ["Heartbeat"] * 3, repeatable=False),
    "complete": Case(_leased, lambda queue, held: queue.complete(held, atomic=True), ["Completed"] * 3),
    "complete-some": Case(_leased, lambda queue, held: queue.complete(held[::2]), ["Completed"] * 2),
    "fail": Case(_leased, lambda queue, held: queue.fail(held, "no luck"), ["Failed"] * 3),
    "fail-for-good": Case(
        _leased,
        lambda queue, held: queue.fail(held, "hopeless", requeue=False),
        ["Failed"] * 3 + ["DeadLettered"] * 3,
    ),
    "release": Case(_leased, lambda queue, held: queue.release(held), ["Released"] * 3),
    "release-owner": Case(_leased, lambda queue, _: queue.release_owner("holder"), ["Released"] * 3),
    "sweep": Case(_expired, lambda queue, _: queue.sweep(), ["Expired"] * 3),
    "drain": Case(_enqueued, lambda queue, _: queue.drain(), ["Drained"] * 3),
    "restore": Case(_drained, lambda queue, drained: queue.restore(drained), ["Restored"] * 3),
    "requeue-dead": Case(_dead, lambda queue, ids: queue.requeue_dead(ids), ["Restored"] * 3),
    "purge-dead": Case(_dead, lambda queue, ids: queue.purge_dead(ids), ["Purged"] * 3),
    "prune-events": Case(_enqueued, lambda queue, _: queue.prune_events(before=4), []),
}


def do(url: str, namespace: str, name: str, prepared: Any, death: Death) -> None:
    """What the process that is to be killed runs."""
    CASES[name].act(open_queue(url, namespace, CONFIG, death), prepared)
