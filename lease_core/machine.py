"""The state machine: what a command does to an item. Pure: no I/O, no clock, no randomness.

                 ┌────────────── fail, expire, release ─────────────┐
                 ▼                                                  │
    enqueue ─▶ PENDING ──────────────── grant ───────────────▶ LEASED ── complete ─▶ COMPLETED
                 │  ▲                                            │  ▲│
               drain restore                    fail, expire     │  └┘ heartbeat
                 ▼  │                           (attempts used   ▼
               DRAINED            requeue_dead   up) ───────▶  DEAD ── purge ─▶ gone
                            PENDING ◀────────────────────────────┘

Items that entered together mostly stay together, so the machine decides for a *span*: items with consecutive ids that
are in exactly the same condition. A decision for a span is the decision for each of its items; cutting a span, or
joining two that match, changes nothing about any item. A span of one is a single item.

The SQL queue, replay and the simulator all decide here, so they cannot disagree.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import Final

import msgspec

from lease_core.model import EventType


class State(IntEnum):
    PENDING = 1
    LEASED = 2
    COMPLETED = 3
    DEAD = 4
    DRAINED = 5


class Ended(IntEnum):
    """How the last lease on an item ended. It makes a repeated fail or release recognisable."""

    FAILED = 1
    RELEASED = 2
    EXPIRED = 3


class Span(msgspec.Struct, frozen=True, gc=False):
    """The items ``first`` to ``last``, all in the same condition. Times are epoch microseconds.

    ``available_at`` orders pending items and says since when a lease or an end has stood otherwise. ``attempt`` counts
    grants. The lease fields describe the current lease or, outside of one, the last. ``fence`` belongs to ``first``;
    each following item's is one higher. ``key`` is set while the item takes part in exclusivity.
    """

    first: int
    last: int
    state: State
    priority: int
    available_at: int
    attempt: int = 0
    lease_id: str | None = None
    owner: str | None = None
    fence: int = 0
    expires_at: int | None = None
    ended: Ended | None = None
    key: str | None = None
    result: bytes | None = None
    has_errors: bool = False

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def leased_attempt(self) -> int:
        """The attempt of the current or last lease: a release gives the number back."""
        return self.attempt + (self.ended is Ended.RELEASED)

    def cut(self, first: int, last: int) -> Span:
        """The part of this span from ``first`` to ``last``."""
        if first == self.first and last == self.last:
            return self
        return replace(self, first=first, last=last, fence=self.fence and self.fence + first - self.first)

    def continues(self, other: Span) -> bool:
        """Whether ``other`` could be appended to this span without changing any item."""
        return (
            other.first == self.last + 1
            and self.key is None
            and other.fence == (self.fence and self.fence + len(self))
            and other == replace(self, first=other.first, last=other.last, fence=other.fence)
        )


replace = msgspec.structs.replace


def join(spans: list[Span]) -> list[Span]:
    """The same items in as few spans as possible. ``spans`` are disjoint, in any order."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda each: each.first):
        if joined and joined[-1].continues(span):
            joined[-1] = replace(joined[-1], last=span.last)
        else:
            joined.append(span)
    return joined


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The part of a token that must match, for the items of a span: ``fence`` is that of the span's first item."""

    attempt: int
    lease_id: str
    fence: int


class Retry(msgspec.Struct, frozen=True):
    """When a failed item may be tried again, and how often."""

    max_attempts: int
    delay: int
    delay_cap: int

    def wait(self, attempt: int, seed: str) -> int:
        """Microseconds to wait after the given attempt: doubling each time up to the cap, less up to a quarter.

        What is taken off depends on the seed (the lease's id) and the attempt alone, so that replay and retries
        of the same call agree, while batches that failed together do not come back in step.
        """
        if self.delay == 0:
            return 0
        doubled = min(self.delay << min(max(attempt - 1, 0), 40), self.delay_cap)
        return doubled - doubled // 4 * (zlib.crc32(f"{seed}/{attempt}".encode()) % 1024) // 1024


# Commands


class Grant(msgspec.Struct, frozen=True):
    lease_id: str
    owner: str
    fence: int
    expires_at: int


class Heartbeat(msgspec.Struct, frozen=True):
    claim: Claim
    expires_at: int


class Complete(msgspec.Struct, frozen=True):
    claim: Claim
    result: bytes | None = None


class Fail(msgspec.Struct, frozen=True):
    """``delay`` overrides the retry rule; ``requeue=False`` dead-letters at once."""

    claim: Claim
    retry: Retry
    requeue: bool = True
    delay: int | None = None


class Release(msgspec.Struct, frozen=True):
    claim: Claim


class Expire(msgspec.Struct, frozen=True):
    retry: Retry


class Drain(msgspec.Struct, frozen=True):
    pass


class Restore(msgspec.Struct, frozen=True):
    """Put a drained item back as it was."""

    available_at: int


class Requeue(msgspec.Struct, frozen=True):
    """Give a dead item all of its attempts again."""


class Purge(msgspec.Struct, frozen=True):
    pass


Command = Grant | Heartbeat | Complete | Fail | Release | Expire | Drain | Restore | Requeue | Purge


# Outcomes


class Moved(msgspec.Struct, frozen=True):
    """The span is now ``to`` (None: gone), and the log says so with ``events``, in that order."""

    to: Span | None
    events: tuple[EventType, ...]


class Repeated(msgspec.Struct, frozen=True):
    """The very same command was accepted before: accept it again, change nothing, log nothing."""


class Refused(msgspec.Struct, frozen=True):
    code: str
    reason: str


Outcome = Moved | Repeated | Refused

STALE: Final = "resourcelease.stale_token"
EXPIRED: Final = "resourcelease.lease_expired"
UNKNOWN: Final = "resourcelease.unknown_item"
NOT_APPLICABLE: Final = "resourcelease.not_applicable"
BATCH: Final = "resourcelease.batch_refused"

_NO_ITEM = Refused(UNKNOWN, "no such item here: it was never enqueued, or its retention has passed")


def decide(span: Span | None, command: Command, now: int) -> Outcome:
    """What ``command`` does to the items of ``span`` (None: there are none) at ``now``. Defined for every case."""
    if span is None:
        return _NO_ITEM
    match command:
        case Heartbeat() | Complete() | Fail() | Release():
            return _acknowledge(span, command, now)
        case Grant():
            return _grant(span, command, now)
        case Expire(retry):
            return _expire(span, retry, now)
        case Drain():
            if span.state is not State.PENDING:
                return _wrong_state(span, "drained")
            return Moved(_finish(span, State.DRAINED, now), (EventType.DRAINED,))
        case Restore(available_at):
            if span.state is not State.DRAINED:
                return _wrong_state(span, "restored")
            return Moved(replace(span, state=State.PENDING, available_at=available_at), (EventType.RESTORED,))
        case Requeue():
            if span.state is not State.DEAD:
                return _wrong_state(span, "requeued")
            return Moved(fresh(span, now), (EventType.RESTORED,))
        case Purge():
            if span.state is not State.DEAD:
                return _wrong_state(span, "purged")
            return Moved(None, (EventType.PURGED,))


def _acknowledge(span: Span, command: Heartbeat | Complete | Fail | Release, now: int) -> Outcome:
    claim = command.claim
    if (claim.lease_id, claim.attempt, claim.fence) != (span.lease_id, span.leased_attempt, span.fence):
        return Refused(STALE, _why_stale(span))
    if span.state is not State.LEASED:
        return _after_the_end(span, command)
    assert span.expires_at is not None
    if span.expires_at <= now:
        return Refused(
            EXPIRED, "the lease expired before this call reached the queue; the item will be handed out again"
        )
    match command:
        case Heartbeat(_, expires_at):
            longer = replace(span, expires_at=max(span.expires_at, expires_at))
            return Moved(longer, (EventType.HEARTBEAT,))
        case Complete(_, result):
            return Moved(replace(_finish(span, State.COMPLETED, now), result=result), (EventType.COMPLETED,))
        case Fail(_, retry, requeue, delay):
            return _fail(span, retry, requeue, delay, now)
        case Release():
            back = _wait_again(span, Ended.RELEASED, now)
            return Moved(replace(back, attempt=span.attempt - 1), (EventType.RELEASED,))


def _after_the_end(span: Span, command: Heartbeat | Complete | Fail | Release) -> Outcome:
    """The token was the item's last one, but its lease has ended: a repeat is fine, anything else came too late."""
    match command:
        case Complete() if span.state is State.COMPLETED:
            return Repeated()
        case Fail() if span.ended is Ended.FAILED:
            return Repeated()
        case Release() if span.ended is Ended.RELEASED:
            return Repeated()
    if span.ended is Ended.EXPIRED:
        return Refused(EXPIRED, f"the lease expired, and the item is {span.state.name.lower()} since")
    return Refused(STALE, _why_stale(span))


def _why_stale(span: Span) -> str:
    if span.state is State.LEASED:
        return f"the token is not the current one: {span.owner} holds attempt {span.attempt}"
    ended = f" (its last lease {span.ended.name.lower()})" if span.ended else ""
    return f"the token holds no lease: the item is {span.state.name.lower()}{ended}"


def _grant(span: Span, command: Grant, now: int) -> Outcome:
    if span.state is not State.PENDING:
        return _wrong_state(span, "leased")
    if span.available_at > now:
        return Refused(NOT_APPLICABLE, "the item is delayed; its time has not come")
    leased = replace(
        span,
        state=State.LEASED,
        available_at=now,
        attempt=span.attempt + 1,
        lease_id=command.lease_id,
        owner=command.owner,
        fence=command.fence,
        expires_at=command.expires_at,
        ended=None,
    )
    return Moved(leased, (EventType.LEASE_GRANTED,))


def _fail(span: Span, retry: Retry, requeue: bool, delay: int | None, now: int) -> Outcome:
    failed = replace(span, has_errors=True)
    if not requeue or span.attempt >= retry.max_attempts:
        dead = replace(_finish(failed, State.DEAD, now), ended=Ended.FAILED)
        return Moved(dead, (EventType.FAILED, EventType.DEAD_LETTERED))
    assert span.lease_id is not None
    pause = retry.wait(span.attempt, span.lease_id) if delay is None else delay
    return Moved(_wait_again(failed, Ended.FAILED, now + pause), (EventType.FAILED,))


def _expire(span: Span, retry: Retry, now: int) -> Outcome:
    if span.state is not State.LEASED or span.expires_at is None:
        return _wrong_state(span, "expired")
    if span.expires_at > now:
        return Refused(NOT_APPLICABLE, "the lease has not run out")
    lost = replace(span, has_errors=True)
    if span.attempt >= retry.max_attempts:
        dead = replace(_finish(lost, State.DEAD, now), ended=Ended.EXPIRED)
        return Moved(dead, (EventType.EXPIRED, EventType.DEAD_LETTERED))
    return Moved(_wait_again(lost, Ended.EXPIRED, span.expires_at), (EventType.EXPIRED,))


def fresh(span: Span, available_at: int) -> Span:
    """The same items as if never leased; that they have failed before is remembered."""
    return Span(
        span.first,
        span.last,
        State.PENDING,
        span.priority,
        available_at,
        key=span.key,
        has_errors=span.has_errors,
    )


def _wait_again(span: Span, ended: Ended, available_at: int) -> Span:
    return replace(span, state=State.PENDING, available_at=available_at, expires_at=None, ended=ended)


def _finish(span: Span, state: State, now: int) -> Span:
    return replace(span, state=state, available_at=now, expires_at=None, key=None)


def _wrong_state(span: Span, verb: str) -> Refused:
    return Refused(NOT_APPLICABLE, f"an item that is {span.state.name.lower()} cannot be {verb}")
