"""The queue as its log tells it: events in, items out, by the same machine that the queue decides with.

It needs no database and trusts nothing: an event that could not have happened to the items as they stand raises
``ReplayDiverged`` with its number.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lease_core.errors import LeaseError
from lease_core.machine import (
    Claim,
    Command,
    Complete,
    Drain,
    Ended,
    Expire,
    Fail,
    Grant,
    Heartbeat,
    Moved,
    Purge,
    Release,
    Requeue,
    Restore,
    Retry,
    Span,
    State,
    decide,
    replace,
)
from lease_core.model import EventType, LeaseEvent, LeaseToken, WorkItem, to_micros

_KNOWN = frozenset(EventType)


class ReplayDiverged(LeaseError):
    """The log says that something happened which could not have. ``sequence_number`` is where."""

    code = "resourcelease.replay_diverged"

    def __init__(self, sequence_number: int, problem: str) -> None:
        super().__init__(f"event {sequence_number}: {problem}")
        self.sequence_number = sequence_number
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[int, str]]:
        return type(self), (self.sequence_number, self.problem)


class Replica:
    """Items as the events so far leave them: a span of one for each, and what each item is.

    Items that the queue has forgotten after their retention are still here: forgetting is not an event.
    """

    def __init__(self) -> None:
        self.number = 0
        self.pending = 0
        self.active = 0
        self.backpressure = False
        self.spans: dict[int, Span] = {}
        self.items: dict[int, WorkItem] = {}

    def apply(self, event: LeaseEvent) -> None:
        """Take in the next event of the log."""
        if event.sequence_number != self.number + 1:
            raise ReplayDiverged(event.sequence_number, f"follows {self.number}; events are missing or out of order")
        match event.type:
            case EventType.BACKPRESSURE_CHANGED:
                self.backpressure = event.metadata.get("active") == "true"
            case EventType.ENQUEUED:
                self._enter(event, _enqueued(event))
            case EventType.RESTORED if event.enqueued_at is not None:
                self._enter(event, _restored(event))
            case EventType.DEAD_LETTERED:
                if self._span(event).state is not State.DEAD:
                    raise ReplayDiverged(event.sequence_number, "the item did not die in the event before")
            case _ if event.sequence_id is not None and event.type in _KNOWN:
                self._move(event)
        if (self.pending, self.active) != (event.pending, event.active):
            raise ReplayDiverged(
                event.sequence_number,
                f"counted {self.pending} pending, {self.active} active; the event says {event.pending}, {event.active}",
            )
        self.number = event.sequence_number

    def _enter(self, event: LeaseEvent, span: Span) -> None:
        if event.item is None:
            raise ReplayDiverged(event.sequence_number, "the event lacks its item")
        present = self.spans.get(span.first)
        if present is not None and present.state in (State.PENDING, State.LEASED, State.DEAD):
            raise ReplayDiverged(event.sequence_number, f"item {span.first} is here already")
        self._become(span.first, span)
        self.items[span.first] = event.item

    def _move(self, event: LeaseEvent) -> None:
        span = self._span(event)
        now = to_micros(event.timestamp)
        if event.type == EventType.LEASE_GRANTED:  # what was ready stays so, even if the clock stepped back since
            span = replace(span, available_at=min(span.available_at, now))
        outcome = decide(span, _command(event, span, now), now)
        if not isinstance(outcome, Moved):
            raise ReplayDiverged(event.sequence_number, f"{event.type} of item {span.first}: {outcome}")
        self._become(span.first, outcome.to)

    def _span(self, event: LeaseEvent) -> Span:
        span = self.spans.get(event.sequence_id or 0)
        if span is None:
            raise ReplayDiverged(event.sequence_number, f"item {event.sequence_id} never entered")
        return span

    def _become(self, sequence_id: int, to: Span | None) -> None:
        for span, sign in ((self.spans.get(sequence_id), -1), (to, 1)):
            self.pending += sign * (span is not None and span.state is State.PENDING)
            self.active += sign * (span is not None and span.state is State.LEASED)
        if to is None:
            del self.spans[sequence_id], self.items[sequence_id]
        else:
            self.spans[sequence_id] = to


def replay(events: Iterable[LeaseEvent]) -> Replica:
    """What the events, from the first on, make of an empty queue."""
    replica = Replica()
    for event in events:
        replica.apply(event)
    return replica


def _enqueued(event: LeaseEvent) -> Span:
    sequence_id, available_at = event.sequence_id or 0, to_micros(event.available_at or event.timestamp)
    return Span(sequence_id, sequence_id, State.PENDING, event.item.priority if event.item else 0, available_at)


def _restored(event: LeaseEvent) -> Span:
    claim = claim_of(event.token)
    return as_restored(_enqueued(event), bool(event.requeued), event.attempt or 0, claim, bool(event.errors))


def as_restored(span: Span, requeued: bool, used: int, claim: Claim | None, has_errors: bool) -> Span:
    """New items as they were where they come from: with the attempts used up there and the last lease's token."""
    return replace(
        span,
        state=State.PENDING if requeued else State.DEAD,
        attempt=used,
        lease_id=claim.lease_id if claim else None,
        fence=claim.fence if claim else 0,
        ended=Ended.RELEASED if claim and claim.attempt == used + 1 else None,
        has_errors=has_errors,
    )


def claim_of(token: LeaseToken | None) -> Claim | None:
    return None if token is None else Claim(token.attempt, token.lease_id, token.fence)


def _command(event: LeaseEvent, span: Span, now: int) -> Command:
    """The command that the event tells of."""
    told = Told(
        event.type,
        claim_of(event.token) or Claim(0, "", 0),
        event.peer_id or "",
        to_micros(event.expires_at) if event.expires_at else 0,
        to_micros(event.available_at) if event.available_at else now,
        bool(event.requeued),
        None if event.result is None else msgspec.json.encode(event.result),
    )
    command = told.command(span, now)
    if command is None:
        raise ReplayDiverged(event.sequence_number, f"{event.type} is not something that can happen to an item")
    return command


class Told(msgspec.Struct, gc=False):
    """What an event says was done to items."""

    type: str
    claim: Claim
    owner: str
    expires_at: int
    available_at: int
    requeued: bool
    result: bytes | None

    def command(self, span: Span, now: int) -> Command | None:
        """The command that does it to items that stand like ``span``. None: there is no such thing."""
        match self.type:
            case EventType.LEASE_GRANTED:
                return Grant(self.claim.lease_id, self.owner, self.claim.fence, self.expires_at)
            case EventType.HEARTBEAT:
                return Heartbeat(self.claim, self.expires_at)
            case EventType.COMPLETED:
                return Complete(self.claim, self.result)
            case EventType.FAILED:
                return Fail(self.claim, self._retry(span), self.requeued, self.available_at - now)
            case EventType.EXPIRED:
                return Expire(self._retry(span))
            case EventType.RELEASED:
                return Release(self.claim)
            case EventType.DRAINED:
                return Drain()
            case EventType.RESTORED:
                return Requeue() if span.state is State.DEAD else Restore(self.available_at)
            case EventType.PURGED:
                return Purge()
        return None

    def _retry(self, span: Span) -> Retry:
        """A rule under which the outcome is the one that the event tells of."""
        return Retry(span.attempt + 1 if self.requeued else 0, 0, 0)
