"""What goes into the queue and what comes out of it.

Everything here is a frozen value with a fixed JSON form: camelCase names, empty fields left out, bytes in base64,
times in ISO-8601 UTC. ``to_json`` and ``from_json`` do that for every class; readers skip fields they don't know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from lease_core.errors import LeaseError, LeaseRefused

SCHEMA_VERSION = 1

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
"""A time that says which zone it is in: one that doesn't is refused on reading, rather than guessed."""


class Value(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Base of the model: immutable, comparable, JSON in and out.

    Those that come by the ten thousand are not tracked by the garbage collector (``gc=False``), which would go through
    all of them again and again: what has a form in JSON has no cycles.
    """

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


V = TypeVar("V", bound=Value)
T = TypeVar("T")


def from_json(kind: type[V], data: bytes | str) -> V:
    """The value of class ``kind`` that ``to_json`` wrote, by this version or another."""
    return msgspec.json.decode(data, type=kind)


class WorkItem(Value, frozen=True, gc=False):
    """One piece of work: what is to be worked on, and whatever a worker needs to know about it.

    ``request_id`` makes enqueueing idempotent: the same id is accepted once, as long as its item is remembered.
    ``not_before`` hides the item until then. Higher ``priority`` is leased first.
    """

    resource_type: str
    resource_id: str
    partition_key: str | None = None
    attributes: dict[str, str] = {}
    body: bytes = b""
    payload_encoding: str | None = None
    request_id: str | None = None
    priority: int = 0
    not_before: datetime | None = None


class LeaseToken(Value, frozen=True, gc=False):
    """Proof of holding one item for one attempt. Acknowledging needs it, and only the current one is good.

    ``fence`` is the log number of the grant. It only ever grows, so a store outside the queue can refuse a writer
    whose fence is below the highest one it has seen.
    """

    sequence_id: int
    attempt: int
    lease_id: str
    fence: int


class ItemEffects(Protocol):
    """Side effects of one leased item, each recorded once: see ``lease_core.deterministic``."""

    def id(self, name: str) -> str:
        """The effect's id, the same at every attempt on this item."""

    def run_once(self, name: str, fn: Callable[[], T], *, record_failures: Any = False) -> T:
        """The recorded outcome of the item's effect ``name``; if there is none, that of ``fn()``, which is recorded."""


class LeaseOrigin(Protocol):
    """The queue that a lease came from, as far as the lease needs it."""

    queue_id: str

    def check(self, token: LeaseToken) -> None: ...

    def effects(self, lease: Lease) -> ItemEffects: ...


class Lease(Value, frozen=True, dict=True):
    """An item, held by one owner until ``expires_at`` on the database's clock.

    A lease that a queue has handed out knows that queue. One that was read from JSON, copied or pickled does not.
    """

    item: WorkItem
    token: LeaseToken
    owner_peer_id: str
    granted_at: datetime
    expires_at: datetime
    enqueued_at: datetime
    last_error: str | None = None

    @property
    def origin(self) -> LeaseOrigin | None:
        """The queue object that handed this lease out, if this is that very lease."""
        return self.__dict__.get("_origin")

    def come_from(self, origin: LeaseOrigin) -> Lease:
        """Remember the queue. It is no part of the value: not compared, not written."""
        self.__dict__["_origin"] = origin
        return self

    @property
    def effects(self) -> ItemEffects:
        """Side effects of this item, each recorded once and only under this lease's fence.

        ``lease.effects.run_once("charge", lambda: charge(lease.item))`` runs the effect unless an earlier attempt has
        recorded it; a holder whose lease has ended gets ``LeaseLost`` instead, and records nothing.
        """
        if self.origin is None:
            raise LeaseError(
                "this lease was not handed out by a queue that this process has open (it was read from JSON, copied "
                "or pickled): use EffectStore.run_once(effect_id, fn, lease=lease)"
            )
        return self.origin.effects(self)


class ErrorRecord(Value, frozen=True, gc=False):
    """One failed attempt: when, whose, and the error's text (first line: type and message; then the stack)."""

    attempt: int
    at: datetime
    error: str
    peer_id: str | None = None


class PendingItem(Value, frozen=True):
    """An item outside of any lease: what ``drain`` hands out, ``restore`` takes, and ``dead_letters`` lists.

    ``queue_id`` and ``namespace`` say where it comes from, so that restoring it twice is still once.
    """

    item: WorkItem
    sequence_id: int
    attempt: int
    enqueued_at: datetime
    last_error: str | None = None
    last_token: LeaseToken | None = None
    dead_lettered: bool = False
    namespace: str | None = None
    queue_id: str | None = None
    errors: tuple[ErrorRecord, ...] = ()


class Receipt(Value, frozen=True, gc=False):
    """What ``enqueue`` or ``restore`` made of one item. ``duplicate``: it was here already, under this id."""

    sequence_id: int
    duplicate: bool = False


class Refusal(Value, frozen=True):
    """A token that changed nothing, with a stable ``code`` and a ``reason`` for people."""

    token: LeaseToken
    code: str
    reason: str


class AckResult(Value, frozen=True):
    """What became of each token of a heartbeat, complete, fail or release, and the queue's depth afterwards."""

    accepted: tuple[LeaseToken, ...] = ()
    refused: tuple[Refusal, ...] = ()
    pending: int = 0
    active: int = 0

    def raise_if_refused(self) -> AckResult:
        """Raise ``LeaseRefused`` if any token was refused; otherwise hand back this result."""
        if self.refused:
            raise LeaseRefused(self.refused)
        return self

    def __iter__(self) -> Iterator[LeaseToken]:
        return iter(self.accepted)


class QueueStats(Value, frozen=True):
    """The queue in numbers, read in one cheap query however long the queue is.

    ``pending`` counts every item waiting, ``delayed`` those among them whose time has not come.
    ``oldest_pending_age`` is how many seconds the longest-waiting item that could be leased now has been waiting.
    ``completed`` counts all completions ever. ``head`` is the number of the last event in the log.
    """

    pending: int
    active: int
    delayed: int
    dead: int
    oldest_pending_age: float | None
    backpressure: bool
    head: int
    completed: int


class SweepResult(Value, frozen=True):
    """What ``sweep`` did: leases that had run out, how many of those were dead-lettered, finished items forgotten."""

    expired: int = 0
    dead_lettered: int = 0
    forgotten: int = 0


class ItemStatus(Value, frozen=True):
    """Where one item stands. ``state``: pending, leased, completed, dead or drained."""

    sequence_id: int
    state: str
    item: WorkItem
    attempt: int
    enqueued_at: datetime
    available_at: datetime | None = None
    owner_peer_id: str | None = None
    token: LeaseToken | None = None
    expires_at: datetime | None = None
    finished_at: datetime | None = None
    result: Any = None
    errors: tuple[ErrorRecord, ...] = ()


class Completion(Value, frozen=True):
    """Neighbouring items that were completed together with the same result.

    ``sequence_number`` is that of the last of their events, so completions are published in its order.
    """

    sequence_number: int
    sequence_ids: tuple[int, int]
    lease_id: str
    attempt: int
    fence: int
    owner_peer_id: str | None
    completed_at: datetime
    result: Any = None


class EventType(StrEnum):
    """What can happen to an item, as the log names it."""

    ENQUEUED = "Enqueued"
    LEASE_GRANTED = "LeaseGranted"
    HEARTBEAT = "Heartbeat"
    COMPLETED = "Completed"
    FAILED = "Failed"
    EXPIRED = "Expired"
    RELEASED = "Released"
    DEAD_LETTERED = "DeadLettered"
    DRAINED = "Drained"
    RESTORED = "Restored"
    PURGED = "Purged"
    BACKPRESSURE_CHANGED = "BackpressureChanged"


class LeaseEvent(Value, frozen=True, gc=False):
    """One entry of the log: one thing that happened to one item (or, for backpressure, to the queue).

    ``sequence_number`` is dense per namespace and follows commit order. ``sequence_id`` is the item's.
    ``item`` is whole where the item enters (Enqueued, Restored); later events carry its name only: resource type and
    id, and partition key; a Heartbeat not even that. ``peer_id`` is who acted or, where nobody is named, the holder.
    ``pending`` and ``active`` are the queue's depth right after the event.
    ``requeued`` says, of Failed, Expired and Restored, whether the item is pending again (else it is dead), and
    ``available_at`` from when on. ``attempt`` is how many it has used up. A Restored item brings its ``errors`` along.
    ``type`` is a plain string, so that a reader survives types it has never heard of.
    ``schema_version`` is always written; an event that comes without one is from the first version.
    """

    namespace: str
    sequence_number: int
    type: str
    timestamp: Moment
    sequence_id: int | None = None
    token: LeaseToken | None = None
    item: WorkItem | None = None
    error: str | None = None
    peer_id: str | None = None
    principal: str | None = None
    result: Any = None
    pending: int = 0
    active: int = 0
    expires_at: Moment | None = None
    available_at: Moment | None = None
    enqueued_at: Moment | None = None
    requeued: bool | None = None
    attempt: int | None = None
    errors: tuple[ErrorRecord, ...] = ()
    metadata: dict[str, str] = {}
    schema_version: int = msgspec.field(default_factory=lambda: _FIRST_VERSION)  # a factory's value is never left out


@lru_cache(maxsize=4096)
def to_datetime(micros: int) -> datetime:
    """Epoch microseconds, as the tables keep time, to an aware UTC datetime."""
    return datetime.fromtimestamp(micros // 1_000_000, UTC).replace(microsecond=micros % 1_000_000)


def to_micros(moment: datetime) -> int:
    """An aware datetime to epoch microseconds, exactly."""
    delta = moment - _EPOCH
    return (delta.days * 86_400 + delta.seconds) * 1_000_000 + delta.microseconds


_FIRST_VERSION = 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
