"""Short words for what nearly every case says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lease_core import Lease, LeaseEvent, LeaseQueue, LeaseToken, WorkItem


def work(name: str = "a", **fields: Any) -> WorkItem:
    return WorkItem(resource_type="file", resource_id=name, **fields)


def works(count: int, **fields: Any) -> list[WorkItem]:
    return [work(str(number), **fields) for number in range(1, count + 1)]


def names(leases: Iterable[Any]) -> list[str]:
    """The resource ids of leases, pending items or statuses."""
    return [each.item.resource_id for each in leases]


def ids(leases: Iterable[Lease]) -> list[int]:
    return [lease.token.sequence_id for lease in leases]


def tokens(leases: Iterable[Lease]) -> list[LeaseToken]:
    return [lease.token for lease in leases]


def one(queue: LeaseQueue, peer: str = "worker", **arguments: Any) -> Lease:
    """The one lease that the queue gives now."""
    [lease] = queue.lease(peer, **arguments)
    return lease


def log(queue: LeaseQueue, after: int = 0) -> list[LeaseEvent]:
    """All of the log from above ``after``."""
    events: list[LeaseEvent] = []
    while page := queue.events(after=events[-1].sequence_number if events else after):
        events += page
    return events


def types(queue: LeaseQueue, after: int = 0) -> list[str]:
    return [event.type for event in log(queue, after)]


def state(queue: LeaseQueue, sequence_id: int) -> str | None:
    """The state of an item; None if the queue does not know it."""
    found = queue.inspect(sequence_id)
    return found[0].state if found else None


def everything(queue: LeaseQueue) -> tuple[Any, ...]:
    """All there is to see of the queue, for comparing before and after."""
    known = queue.inspect(range(1, 200))
    return queue.stats(), known, queue.leases(), queue.dead_letters(), queue.drained()


@contextmanager
def nothing_changes(queue: LeaseQueue) -> Iterator[None]:
    """The block must leave no trace: not in the numbers, not in the items, not in the log."""
    before = everything(queue)
    yield
    assert everything(queue) == before
