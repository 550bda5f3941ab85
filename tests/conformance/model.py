"""A queue as plain as can be: one dict, one item at a time, no batches, no spans, no database."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lease_core import LeaseToken
from tests.conformance.clock import FakeClock


@dataclass
class PlainItem:
    priority: int
    available: int
    state: str = "pending"
    attempt: int = 0
    token: LeaseToken | None = None
    expires: int = 0
    ended: str | None = None
    not_before: int = 0


class PlainQueue:
    """Times are the clock's microseconds. What the queue may choose itself (lease ids, pauses) is told to it."""

    def __init__(self, clock: FakeClock, max_attempts: int) -> None:
        self.clock = clock
        self.max_attempts = max_attempts
        self.items: dict[int, PlainItem] = {}
        self.completed = 0

    def enqueue(self, sequence_id: int, priority: int, delay: int) -> None:
        available = self.clock.micros + delay
        self.items[sequence_id] = PlainItem(priority, available, not_before=available)

    def expire(self) -> None:
        """Every lease that has run out ends."""
        for item in self.items.values():
            if item.state == "leased" and item.expires <= self.clock.micros:
                item.ended, item.available = "expired", item.expires
                item.state = "dead" if item.attempt >= self.max_attempts else "pending"

    def next(self, limit: int) -> list[int]:
        """The ids that a lease must give now, in order."""
        self.expire()
        ready = [i for i, item in self.items.items() if item.state == "pending" and item.available <= self.clock.micros]
        return sorted(ready, key=lambda i: (-self.items[i].priority, self.items[i].available, i))[:limit]

    def granted(self, token: LeaseToken, duration: int) -> None:
        item = self.items[token.sequence_id]
        assert token.attempt == item.attempt + 1
        item.state, item.attempt, item.token, item.ended = "leased", token.attempt, token, None
        item.expires = self.clock.micros + duration

    def acknowledge(self, command: str, token: LeaseToken, duration: int = 0, delay: int = 0) -> str:
        """``accepted``, or the code of the refusal without its prefix."""
        item = self.items.get(token.sequence_id)
        if item is None:
            return "unknown_item"
        if token != item.token:
            return "stale_token"
        if item.state != "leased":
            repeats = {"complete": item.state == "completed", "fail": item.ended == "failed"}
            if repeats.get(command, command == "release" and item.ended == "released"):
                return "accepted"
            return "lease_expired" if item.ended == "expired" else "stale_token"
        if item.expires <= self.clock.micros:
            return "lease_expired"
        match command:
            case "heartbeat":
                item.expires = max(item.expires, self.clock.micros + duration)
            case "complete":
                item.state = "completed"
                self.completed += 1
            case "fail":
                item.ended, item.available = "failed", self.clock.micros + delay
                item.state = "dead" if item.attempt >= self.max_attempts else "pending"
            case "release":
                item.state, item.ended, item.available = "pending", "released", self.clock.micros
                item.attempt -= 1
        return "accepted"

    def drain(self) -> set[int]:
        drained = {i for i, item in self.items.items() if item.state == "pending"}
        for i in drained:
            self.items[i].state = "drained"
        return drained

    def restore(self, ids: Iterable[int]) -> None:
        for i in ids:
            item = self.items[i]
            if item.state == "drained":
                item.state, item.available = "pending", max(self.clock.micros, item.not_before)

    def requeue_dead(self, ids: Iterable[int]) -> list[int]:
        found = [i for i in sorted(ids) if i in self.items and self.items[i].state == "dead"]
        for i in found:
            self.items[i] = PlainItem(self.items[i].priority, self.clock.micros)
        return found

    def purge_dead(self, ids: Iterable[int]) -> list[int]:
        found = [i for i in sorted(ids) if i in self.items and self.items[i].state == "dead"]
        for i in found:
            del self.items[i]
        return found

    def count(self, state: str) -> int:
        return sum(item.state == state for item in self.items.values())
