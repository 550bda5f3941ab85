"""Random lives of a queue, and how two queues are compared row for row."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import sqlalchemy as sa

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.model import LeaseEvent
from lease_core.replication import each_event
from lease_core.store import schema
from tests.conformance.clock import FakeClock

RULES = {"retry_delay": 1, "max_attempts": 3, "lease_duration": 30, "retention": 600}


def config(exclusive: str | None = None, **more: Any) -> QueueConfig:
    return QueueConfig(**{**RULES, "exclusive": exclusive, **more})


def live(queue: LeaseQueue, clock: FakeClock, seed: int, steps: int = 120) -> None:
    """Let everything happen to the queue that can, in an order that the seed decides."""
    chance = random.Random(seed)
    held: list[Any] = []
    kept: list[Any] = []
    elsewhere = LeaseQueue.open("sqlite://", "elsewhere", clock=clock)
    acts: list[tuple[int, Callable[[], object]]] = [
        (4, lambda: _enqueue(queue, clock, chance)),
        (4, lambda: held.extend(queue.lease(f"worker-{chance.randrange(3)}", limit=chance.randrange(1, 12)))),
        (2, lambda: queue.complete(_some(held, chance), result={"n": chance.randrange(3)})),
        (2, lambda: queue.fail(_some(held, chance), f"error {chance.randrange(3)}")),
        (1, lambda: queue.fail(_some(held, chance)[:1], "hopeless", requeue=False)),
        (1, lambda: queue.release(_some(held, chance))),
        (1, lambda: queue.heartbeat(held[-5:])),
        (1, lambda: queue.restore(queue.drain(limit=chance.randrange(1, 6))[:4])),
        (1, lambda: kept.extend(queue.drain(limit=chance.randrange(1, 4)))),
        (1, lambda: queue.restore([chance.choice(kept) for _ in range(3 if kept else 0)])),
        (1, lambda: _travel(queue, elsewhere, kept, chance)),
        (1, lambda: queue.requeue_dead([dead.sequence_id for dead in queue.dead_letters()[:2]])),
        (1, lambda: queue.purge_dead([dead.sequence_id for dead in queue.dead_letters()[:1]])),
        (1, lambda: queue.sweep()),
        (3, lambda: clock.advance(chance.choice([0.000_001, 0.5, 3, 40]))),
        (1, lambda: clock.advance(chance.choice([0, 700]) if chance.random() < 0.2 else 0)),
    ]
    weights, actions = zip(*acts, strict=True)
    with elsewhere:
        for _ in range(steps):
            chance.choices(actions, weights)[0]()


def _enqueue(queue: LeaseQueue, clock: FakeClock, chance: random.Random) -> None:
    names = [str(chance.randrange(1, 60)) for _ in range(chance.randrange(1, 15))]
    queue.enqueue(
        [
            WorkItem(
                "file",
                name,
                partition_key=f"p{chance.randrange(4)}" if chance.random() < 0.7 else None,
                attributes={"ä": name} if chance.random() < 0.2 else {},
                body=name.encode() * chance.randrange(3),
                request_id=f"request {name}" if chance.random() < 0.5 else None,
                priority=chance.randrange(3),
                not_before=clock.now() + timedelta(seconds=chance.choice([2, 50])) if chance.random() < 0.1 else None,
            )
            for name in names
        ]
    )


def _some(held: list[Any], chance: random.Random) -> list[Any]:
    chance.shuffle(held)
    taken = [held.pop() for _ in range(min(len(held), chance.randrange(1, 8)))]
    return taken


def _travel(queue: LeaseQueue, elsewhere: LeaseQueue, kept: list[Any], chance: random.Random) -> None:
    """Items go to another queue, where some fail, and come back; some come from there for the first time.

    They are kept, and come again later, when they may have been forgotten.
    """
    elsewhere.restore(queue.drain(limit=3))
    elsewhere.enqueue(WorkItem("guest", str(chance.randrange(1_000))))
    elsewhere.fail(elsewhere.lease("abroad", limit=1), "abroad", delay=0)
    back = elsewhere.drain(limit=3)
    queue.restore(back)
    kept.extend(back)


def events(queue: Any) -> list[LeaseEvent]:
    return list(each_event(queue))


def rows(queue: LeaseQueue) -> dict[str, Any]:
    """What the tables say of every item that is not finished and forgotten, whatever the rows' shape."""
    with queue._store.guard, queue._store.engine.connect() as connection:
        found = connection.execute(sa.select(schema.item.c.id).where(schema.item.c.ns == queue._ns)).scalars().all()
        origins = connection.execute(
            sa.select(schema.origin.c.queue_id, schema.origin.c.origin_id, schema.origin.c.id).where(
                schema.origin.c.ns == queue._ns
            )
        ).all()
        lane = sa.func.sum(sa.case((sa.or_(schema.span.c.state == 2, schema.span.c.ready != 0), 1), else_=0))
        lanes = connection.execute(
            sa.select(lane)
            .where(schema.span.c.ns == queue._ns, schema.span.c.key.is_not(None))
            .group_by(schema.span.c.key)
        )
        open_in_lane = set(lanes.scalars().all())
    statuses = {status.sequence_id: status for status in queue.inspect(found)}
    return {"items": statuses, "origins": {tuple(row) for row in origins}, "lanes": open_in_lane}


def same(original: LeaseQueue, copy: LeaseQueue) -> None:
    """The copy is the original: the same events, counts and rows. It may still know what the original has forgotten."""
    assert events(copy) == events(original)
    assert _counts(copy) == _counts(original)
    one, other = rows(original), rows(copy)
    assert one["items"].items() <= other["items"].items(), _first_difference(one["items"], other["items"])
    assert {other["items"][i].state for i in other["items"].keys() - one["items"].keys()} <= {"completed", "drained"}
    assert one["origins"] <= other["origins"]
    assert one["lanes"] == other["lanes"] == {1} or not other["lanes"]


def _counts(queue: LeaseQueue) -> Any:
    return msgspec.structs.replace(queue.stats(), oldest_pending_age=None)


def _first_difference(one: dict[int, Any], other: dict[int, Any]) -> str:
    for key, value in one.items():
        if other.get(key) != value:
            return f"{value}\n{other.get(key)}"
    return ""
