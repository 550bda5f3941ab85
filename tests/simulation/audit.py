"""What the log alone proves. Fed with events one by one, it knows neither the calls nor the tables.

It objects to anything that must never be seen in a history: a gap, a second holder of a live lease, an expiry
before its time, an acknowledgement by a token that was not the current one, depths that do not add up. What is left
in ``items`` at any time is the replay of the log so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lease_core.model import LeaseEvent, LeaseToken, WorkItem, to_micros
from tests.simulation.model import Violation


@dataclass
class Replayed:
    work: WorkItem
    enqueued_at: int
    state: str = "pending"
    since: int = 0  # available, granted or finished at
    attempt: int = 0
    token: LeaseToken | None = None
    owner: str | None = None
    expires_at: int | None = None
    result: Any = None
    errors: list[str] = field(default_factory=list)


class Audit:
    def __init__(self, namespace: str, exclusive: str | None = None) -> None:
        self.namespace = namespace
        self.exclusive = exclusive
        self.items: dict[int, Replayed] = {}
        self.latest = 0  # the highest time there has been; only the clock knows it
        self.number = 0
        self.pending = 0
        self.active = 0
        self.completed = 0
        self.backpressure = False
        self._grants: set[tuple[str, int]] = set()

    def read(self, event: LeaseEvent) -> None:
        self._require(event.sequence_number == self.number + 1, event, f"does not follow number {self.number}")
        self._require(event.namespace == self.namespace, event, "belongs to another queue")
        self.number = event.sequence_number
        if event.type == "BackpressureChanged":
            told = event.metadata.get("active") == "true"
            self._require(told != self.backpressure, event, "was logged though nothing changed")
            self.backpressure = told
        else:
            at = to_micros(event.timestamp)
            getattr(self, f"_{event.type.lower()}")(event, at)
        self._recount(event)

    def _recount(self, event: LeaseEvent) -> None:
        told, counted = (event.pending, event.active), (self.pending, self.active)
        if told != counted:
            self._require(False, event, f"tells of {told} pending and active, but the log adds up to {counted}")

    def _require(self, holds: bool, event: LeaseEvent, problem: str) -> None:
        if not holds:
            raise Violation(f"event {event.sequence_number} ({event.type} of item {event.sequence_id}) {problem}")

    def _item(self, event: LeaseEvent, *states: str) -> Replayed:
        item = self.items.get(event.sequence_id or 0)
        state = item.state if item else "unknown"
        self._require(item is not None and state in states, event, f"came while the item was {state}")
        assert item is not None
        return item

    # Coming in

    def _enqueued(self, event: LeaseEvent, at: int) -> None:
        assert event.sequence_id is not None
        self._require(event.sequence_id not in self.items, event, "gives an id that is taken")
        assert event.item is not None
        since = at if event.available_at is None else to_micros(event.available_at)
        self.items[event.sequence_id] = Replayed(event.item, at, since=since)
        self.pending += 1

    def _restored(self, event: LeaseEvent, at: int) -> None:
        assert event.sequence_id is not None
        assert event.item is not None
        since = at if event.available_at is None else to_micros(event.available_at)
        if "originId" in event.metadata:
            before = self.items.get(event.sequence_id)
            gone = before is None or before.state in ("completed", "drained")  # forgetting is not logged
            self._require(gone, event, "gives an id that is taken")
            assert event.enqueued_at is not None
            item = Replayed(event.item, to_micros(event.enqueued_at), since=since)
            item.attempt, item.token = event.attempt or 0, event.token
            item.errors = [record.error for record in event.errors]
            item.state = "pending" if event.requeued else "dead"
            self.items[event.sequence_id] = item
        else:
            item = self._item(event, "drained", "dead")
            if item.state == "dead":
                item.attempt, item.token, item.owner = 0, None, None
            item.state, item.since = "pending", since
        self.pending += item.state == "pending"

    # Leases

    def _leasegranted(self, event: LeaseEvent, at: int) -> None:
        item = self._item(event, "pending")
        token = event.token
        self._require(token is not None and event.expires_at is not None, event, "carries no token or no end")
        assert token is not None
        assert event.expires_at is not None
        self._require(item.since <= max(at, self.latest), event, "came before the item was available")
        self._require(token.attempt == item.attempt + 1, event, f"is not attempt {item.attempt + 1}")
        self._require(token.fence == event.sequence_number, event, "has a fence that is not its own number")
        self._require((token.lease_id, token.sequence_id) not in self._grants, event, "reuses a lease id")
        self._grants.add((token.lease_id, token.sequence_id))
        item.state, item.token, item.attempt, item.since = "leased", token, token.attempt, at
        item.owner, item.expires_at = event.peer_id, to_micros(event.expires_at)
        self._require_one_holder(event, item)
        self.pending, self.active = self.pending - 1, self.active + 1

    def _require_one_holder(self, event: LeaseEvent, item: Replayed) -> None:
        if self.exclusive is None:
            return
        key = self._key(item)
        if key is not None:
            others = [i for i, other in self.items.items() if other.state == "leased" and self._key(other) == key]
            self._require(others == [event.sequence_id], event, f"makes {others} active at once under one key")

    def _key(self, item: Replayed) -> Any:
        if self.exclusive == "resource":
            return (item.work.resource_type, item.work.resource_id)
        return item.work.partition_key

    def _live(self, event: LeaseEvent, at: int) -> Replayed:
        """The item, if the event's token is the current one and has not run out."""
        item = self._item(event, "leased")
        self._require(event.token == item.token, event, "carries a token that is not the current one")
        assert item.expires_at is not None
        self._require(at < item.expires_at, event, "came after the lease had run out")
        return item

    def _heartbeat(self, event: LeaseEvent, at: int) -> None:
        item = self._live(event, at)
        assert event.expires_at is not None
        assert item.expires_at is not None
        longer = to_micros(event.expires_at)
        self._require(longer >= item.expires_at, event, "shortens the lease")
        item.expires_at = longer

    def _completed(self, event: LeaseEvent, at: int) -> None:
        item = self._live(event, at)
        item.result = event.result
        self.completed += 1
        self._end(item, "completed", at)

    def _failed(self, event: LeaseEvent, at: int) -> None:
        self._end_with_error(event, self._live(event, at), at)

    def _expired(self, event: LeaseEvent, at: int) -> None:
        item = self._item(event, "leased")
        assert item.expires_at is not None
        self._require(item.expires_at <= at, event, "came before the lease had run out")
        self._end_with_error(event, item, at)

    def _end_with_error(self, event: LeaseEvent, item: Replayed, at: int) -> None:
        item.errors.append(event.error or "")
        if event.requeued:
            assert event.available_at is not None
            self._end(item, "pending", to_micros(event.available_at))
        else:
            self._end(item, "dying", at)

    def _deadlettered(self, event: LeaseEvent, at: int) -> None:
        self._item(event, "dying").state = "dead"

    def _released(self, event: LeaseEvent, at: int) -> None:
        item = self._live(event, at)
        item.attempt -= 1
        self._end(item, "pending", at)

    def _end(self, item: Replayed, state: str, since: int) -> None:
        item.state, item.since, item.expires_at = state, since, None
        self.active -= 1
        self.pending += state == "pending"

    # Going out

    def _drained(self, event: LeaseEvent, at: int) -> None:
        item = self._item(event, "pending")
        item.state, item.since = "drained", at
        self.pending -= 1

    def _purged(self, event: LeaseEvent, at: int) -> None:
        self._item(event, "dead")
        del self.items[event.sequence_id or 0]
