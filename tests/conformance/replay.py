"""What the log says of each item, worked out without any of the queue's own code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from lease_core import LeaseEvent, LeaseToken, WorkItem
from lease_core.model import ErrorRecord, ItemStatus


@dataclass
class Told:
    """An item as the log tells it. The same fields as ``ItemStatus``."""

    sequence_id: int
    item: WorkItem
    enqueued_at: datetime
    state: str = "pending"
    attempt: int = 0
    available_at: datetime | None = None
    owner_peer_id: str | None = None
    token: LeaseToken | None = None
    expires_at: datetime | None = None
    finished_at: datetime | None = None
    result: Any = None
    errors: list[ErrorRecord] = field(default_factory=list)

    def wait(self, available_at: datetime | None) -> None:
        self.state, self.available_at, self.expires_at, self.finished_at = "pending", available_at, None, None

    def finish(self, state: str, at: datetime) -> None:
        self.state, self.available_at, self.expires_at, self.finished_at = state, None, None, at

    def status(self) -> ItemStatus:
        return ItemStatus(**{**self.__dict__, "errors": tuple(self.errors)})


def replay(events: Iterable[LeaseEvent]) -> dict[int, Told]:
    """Every item that ever was, except those purged, as it stands after the last event."""
    told: dict[int, Told] = {}
    for event in events:
        if event.sequence_id is not None:
            _tell(told, event.sequence_id, event)
    return told


def _tell(told: dict[int, Told], sequence_id: int, event: LeaseEvent) -> None:
    known = told.get(sequence_id)
    if known is None:
        known = told[sequence_id] = _enter(sequence_id, event)
        return
    at = event.timestamp
    match event.type:
        case "LeaseGranted":
            known.state, known.attempt, known.available_at = "leased", event.attempt or 0, at
            known.token, known.owner_peer_id, known.expires_at = event.token, event.peer_id, event.expires_at
        case "Heartbeat":
            known.expires_at = event.expires_at
        case "Completed":
            known.finish("completed", at)
            known.result = event.result
        case "Failed" | "Expired":
            known.errors.append(ErrorRecord(event.attempt or 0, at, event.error or "", event.peer_id))
            if event.requeued:
                known.wait(event.available_at)
        case "DeadLettered":
            known.finish("dead", at)
        case "Released":
            known.attempt -= 1
            known.wait(event.available_at)
        case "Drained":
            known.finish("drained", at)
        case "Restored":
            if known.state == "dead":  # requeued from the dead letters: as if never leased
                known.attempt, known.token, known.owner_peer_id = 0, None, None
            known.wait(event.available_at)
        case "Purged":
            del told[sequence_id]
        case _:
            raise AssertionError(f"{event.type} of an item that is here already")


def _enter(sequence_id: int, event: LeaseEvent) -> Told:
    assert event.type in ("Enqueued", "Restored"), f"{event.type} of an item that never came in"
    assert event.item is not None
    entered = Told(sequence_id, event.item, event.enqueued_at or event.timestamp)
    entered.wait(event.available_at or event.timestamp)
    if event.type == "Restored":
        entered.attempt, entered.token = event.attempt or 0, event.token
        entered.errors = list(event.errors)
        if event.requeued is False:
            entered.finish("dead", event.timestamp)
    return entered
