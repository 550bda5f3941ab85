"""The calls of producers and workers: how each is made on the real queue, and what the model makes of it.

``perform`` makes the call. ``expect`` is asked once it is known to have happened; it lets the model do the same,
and gives a function that judges what the real call returned (a crashed caller never got to see that).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lease_core import LeaseQueue, LeaseToken, PendingItem, WorkItem
from lease_core.model import Lease, LeaseEvent, to_datetime
from tests.simulation import checks
from tests.simulation.model import SECOND, Item
from tests.simulation.site import Site

Judge = Callable[[Any], None]


@dataclass
class Operation:
    site: Site
    by: str

    forgets: ClassVar[bool] = False  # whether it may forget finished items, which is not logged
    silent: ClassVar[bool] = False  # whether what it does is not logged at all
    thorough: ClassVar[bool] = True  # whether it goes on until nothing is left to forget
    tidies: ClassVar[bool] = False  # whether it may write what nobody can see: which items have become ready
    looks: ClassVar[bool] = False  # whether it only reads

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def takes_steps(self) -> bool:
        """Whether one call may be several transactions."""
        return self.forgets or self.silent or self.tidies

    def perform(self, queue: LeaseQueue) -> Any:
        raise NotImplementedError

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        raise NotImplementedError

    def describe(self) -> str:
        shown = {k: v for k, v in vars(self).items() if k not in ("site", "by")}
        return f"{self.by}@{self.site.name}: {self.name}({', '.join(f'{k}={_short(v)}' for k, v in shown.items())})"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], LeaseToken):
        return "[" + ", ".join(f"{t.sequence_id}/{t.attempt}#{t.fence}" for t in value) + "]"
    if isinstance(value, list) and value and isinstance(value[0], WorkItem):
        return "[" + ", ".join(_brief(work) for work in value) + "]"
    if isinstance(value, list) and value and isinstance(value[0], PendingItem):
        return "[" + ", ".join(f"{(p.namespace or '').partition('-')[0]}:{p.sequence_id}" for p in value) + "]"
    return repr(value)


def _brief(work: WorkItem) -> str:
    more = [f"@{work.partition_key}" if work.partition_key else "", f"!{work.priority}" if work.priority else ""]
    more += [f"?{work.request_id}" if work.request_id else "", "+later" if work.not_before else ""]
    return work.resource_id + "".join(more)


# Producers


@dataclass
class Enqueue(Operation):
    items: list[WorkItem]

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.enqueue(self.items, peer_id=self.by)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        receipts = self.site.model.enqueue(self.items, self.by)
        return lambda got: checks.require(got == receipts, f"receipts are {got}; they should be {receipts}")


@dataclass
class EnqueueInMyTransaction(Enqueue):
    """The producer's own transaction: the items come to be, or don't, with it."""

    commits: bool = True

    def perform(self, queue: LeaseQueue) -> Any:
        pooled = queue._store.engine.raw_connection()
        connection: Any = pooled.driver_connection
        try:
            connection.execute("BEGIN" if "postgresql" in self.site.url else "BEGIN IMMEDIATE")
            try:
                receipts = queue.enqueue(self.items, peer_id=self.by, connection=connection)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT" if self.commits else "ROLLBACK")
            return receipts
        finally:
            pooled.close()

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        if not self.commits:  # refused or not, nothing is left of it
            copy.deepcopy(self.site.model).enqueue(self.items, self.by)
            return lambda got: None
        return super().expect(heard)


# Workers


@dataclass
class LeaseSome(Operation):
    limit: int
    duration: float | None
    upkeep: bool = False
    tidies: ClassVar[bool] = True
    thorough: ClassVar[bool] = False

    @property
    def forgets(self) -> bool:  # type: ignore[override]
        return self.upkeep

    def perform(self, queue: LeaseQueue) -> Any:
        queue._forget_at = 0.0 if self.upkeep else float("inf")
        try:
            return queue.lease(self.by, self.limit, duration=self.duration)
        finally:
            queue._forget_at = float("inf")

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        duration = self.site.config.lease_duration if self.duration is None else self.duration
        granted = self.site.model.lease(self.by, self.limit, round(duration * SECOND))
        expected = [as_lease(item) for item in granted]
        return lambda got: checks.require(got == expected, f"leased {got}; it should be {expected}")


def as_lease(item: Item) -> Lease:
    assert item.token is not None
    assert item.expires_at is not None
    return Lease(
        item.work,
        item.token,
        item.owner or "",
        to_datetime(item.available_at),
        to_datetime(item.expires_at),
        to_datetime(item.enqueued_at),
        item.errors[-1][1] if item.errors else None,
    )


@dataclass
class Acknowledge(Operation):
    tokens: list[LeaseToken]
    verb: ClassVar[str]

    def how(self) -> dict[str, Any]:
        return {}

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        model = self.site.model
        accepted, refused = model.acknowledge(self.verb, self.tokens, **self.how())
        return lambda got: checks.acknowledged_as_expected(got, accepted, refused, model)


@dataclass
class Heartbeat(Acknowledge):
    duration: float | None = None
    verb = "heartbeat"

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.heartbeat(self.tokens, duration=self.duration)

    def how(self) -> dict[str, Any]:
        duration = self.site.config.lease_duration if self.duration is None else self.duration
        return {"duration": round(duration * SECOND)}


@dataclass
class Complete(Acknowledge):
    result: Any = None
    atomic: bool = False
    verb = "complete"

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.complete(self.tokens, self.result, atomic=self.atomic)

    def how(self) -> dict[str, Any]:
        return {"result": self.result, "atomic": self.atomic}


@dataclass
class Fail(Acknowledge):
    error: str = "failed"
    requeue: bool = True
    delay: float | None = None
    verb = "fail"

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.fail(self.tokens, self.error, self.requeue, self.delay)

    def how(self) -> dict[str, Any]:
        delay = None if self.delay is None else round(self.delay * SECOND)
        return {"error": self.error, "requeue": self.requeue, "delay": delay}


@dataclass
class Release(Acknowledge):
    verb = "release"

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.release(self.tokens)


@dataclass
class ReleaseOwner(Operation):
    peer: str

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.release_owner(self.peer)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        released = self.site.model.release_owner(self.peer)
        return lambda got: checks.require(got == released, f"{got} were released; it should be {released}")
