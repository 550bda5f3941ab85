"""The lease queue: what users call. Each method is one transaction; the duties live in the modules it names."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sa

from lease_core import acking, entering, granting, leaving, limits, payload, reading, recording, retention, waiting
from lease_core import namespace as namespaces
from lease_core.config import QueueConfig
from lease_core.deterministic.state import StateStore
from lease_core.errors import InvalidInput, LeaseError, describe
from lease_core.hold import AskedAt, Hold
from lease_core.machine import Complete, Fail, Heartbeat, Release, Retry, State
from lease_core.model import (
    AckResult,
    Completion,
    ItemStatus,
    Lease,
    LeaseEvent,
    LeaseToken,
    PendingItem,
    QueueStats,
    Receipt,
    SweepResult,
    WorkItem,
    to_datetime,
)
from lease_core.sqlite_file import check_file
from lease_core.store import migrate, open_store, parse, shown
from lease_core.store.base import Clock, Store
from lease_core.unit import SealedUnit, Unit, run

T = TypeVar("T")
Tokens = LeaseToken | Lease | Iterable[LeaseToken | Lease]

DEFAULT_NAMESPACE = "resourcelease"
_FORGET_EVERY = 5.0
_MOST_LISTED = 100_000


class LeaseQueue:
    """A durable queue of work items that many processes share.

    Open one with ``LeaseQueue.open``. It is a context manager, safe to share between threads, and may be used in a
    forked child. Every method either happened as a whole, in the database and in the log, or raised and left no trace.
    """

    def __init__(
        self,
        store: Store,
        ns: int,
        namespace: str,
        queue_id: str,
        config: QueueConfig,
        effects: StateStore | None = None,
    ) -> None:
        self._store = store
        self._ns = ns
        self.namespace = namespace
        self.queue_id = queue_id
        self.config = config
        self._retry = Retry(
            config.max_attempts,
            round(config.retry_delay * 1_000_000),
            round(config.retry_delay_cap * 1_000_000),
        )
        self._forget_at = time.monotonic() + _FORGET_EVERY
        self._forgetting = threading.Lock()
        self._asked_at = AskedAt()
        self._holds: weakref.WeakValueDictionary[int, Hold] = weakref.WeakValueDictionary()
        self._origin = recording.Origin(store, ns, queue_id, effects)

    # Opening

    @classmethod
    def open(
        cls,
        url: str | sa.URL,
        namespace: str = DEFAULT_NAMESPACE,
        config: QueueConfig | None = None,
        *,
        auto_migrate: bool | None = None,
        clock: Clock | None = None,
        effects: StateStore | None = None,
    ) -> LeaseQueue:
        """Open the queue ``namespace`` in the database at ``url``, making the namespace if it is new.

        ``sqlite:///path`` is a file, ``sqlite://`` memory, ``postgresql://…`` a server. A SQLite file gets its schema,
        or a newer one, on opening; PostgreSQL only with ``auto_migrate=True`` or by ``LeaseQueue.migrate``.
        ``clock`` replaces the clock that the queue goes by, with a function giving epoch seconds; it is for tests.
        ``effects`` is where ``lease.effects`` records, by default the queue's own database; closing it stays with you.
        """
        config = config or QueueConfig()
        limits.name("namespace", namespace, config.max_id_bytes)
        if effects is not None and not isinstance(effects, StateStore):
            raise InvalidInput(
                "effects", f"must be a StateStore, not {type(effects).__name__}; use StateStore.open(url)"
            )
        store = open_store(url, config, clock)
        try:
            auto = store.engine.dialect.name == "sqlite" if auto_migrate is None else auto_migrate
            migrate.ensure(store, auto)
            head = namespaces.enter(store, namespace, config)
        except BaseException:
            store.close()
            raise
        return cls(store, head.ns, namespace, head.queue_id, config, effects)

    @classmethod
    def _open_existing(cls, url: str | sa.URL, namespace: str) -> LeaseQueue:
        """Open a queue that is there, for commands that look at it or follow it: they make no file, schema or name.

        Raises a ``StoreError`` if there is none, so that who means to wait for it can.
        """
        config = QueueConfig()
        limits.name("namespace", namespace, config.max_id_bytes)
        parsed = parse(url)
        if parsed.get_backend_name() == "sqlite":
            check_file(parsed)
        store = open_store(parsed, config, None)
        try:
            migrate.ensure(store, auto=False)
            head = namespaces.existing(store, namespace)
        except BaseException:
            store.close()
            raise
        return cls(store, head.ns, namespace, head.queue_id, config)

    @staticmethod
    def migrate(url: str | sa.URL) -> None:
        """Give the database at ``url`` the schema that this version needs. Safe to repeat, and to run at once."""
        store = open_store(url, QueueConfig(), None)
        try:
            migrate.ensure(store, auto=True)
        finally:
            store.close()

    def close(self) -> None:
        """Let go of the database. Leases stay as they are until they end or expire."""
        self._store.close()

    def __enter__(self) -> LeaseQueue:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LeaseQueue({shown(self._store.url)!r}, namespace={self.namespace!r})"

    # Coming in

    def enqueue(
        self,
        items: WorkItem | Iterable[WorkItem],
        *,
        wait: float | None = None,
        connection: Any = None,
        peer_id: str | None = None,
        principal: str | None = None,
    ) -> list[Receipt]:
        """Add items, all of them or none. Gives a receipt for each, in order.

        An item whose ``request_id`` is known is not added again; its receipt says ``duplicate``. While the queue is
        under backpressure this waits up to ``wait`` seconds, then raises ``BackpressureActive``; without ``wait`` it
        raises at once. With ``connection`` (SQLAlchemy's, or the driver's) the items are part of that connection's
        transaction, and come to be, or don't, with it; the queue's writers wait until it ends, so end it soon.
        """
        listed = limits.work_items(items, self.config)
        patience = 0.0 if wait is None else limits.seconds("wait", wait) / 1_000_000
        limits.identity(self.config, peer_id=peer_id, principal=principal)
        if not listed:
            return []
        if connection is not None:
            if patience:
                raise InvalidInput("wait", "cannot be used with connection: it would hold your transaction open")
            return self._enqueue_joined(listed, connection, peer_id, principal)
        prepared = [payload.prepare(item) for item in listed]
        return waiting.for_room(
            self._store, self._ns, patience, lambda unit: entering.enqueue(unit, prepared, peer_id, principal)
        )

    def _enqueue_joined(
        self, items: list[WorkItem], connection: Any, peer: str | None, principal: str | None
    ) -> list[Receipt]:
        self._store.check_usable()
        if isinstance(connection, sa.Connection):
            if not connection.in_transaction():
                connection.begin()
            connection = connection.connection.driver_connection
        with self._store.joined(self._ns, connection) as transaction:
            unit = Unit(self._store, transaction)
            unit.fetch()
            if unit.head.queue_id != self.queue_id:
                raise InvalidInput("connection", "is to another database than the one this queue is in")
            try:
                receipts = entering.enqueue(unit, [payload.prepare(item) for item in items], peer, principal)
            except entering.NoRoom as refused:
                raise refused.told() from None
            unit.flush()
            transaction.commit()
            return receipts

    def restore(self, items: PendingItem | Iterable[PendingItem], *, principal: str | None = None) -> list[Receipt]:
        """Put back what ``drain`` handed out, in this queue or another one. Restoring twice is restoring once.

        Sequence id, attempt and last token are kept. Where another item has the id already a new one is given, and
        the origin is recorded. Neither backpressure nor capacity stand in the way of a restore.
        """
        listed = limits.pending_items(items, self.config)
        limits.identity(self.config, principal=principal)
        return self._run(lambda unit: entering.restore(unit, listed, principal)) if listed else []

    # Leasing

    def lease(
        self,
        peer_id: str,
        limit: int = 1,
        *,
        wait: float | None = None,
        duration: float | None = None,
        partition_key: str | None = None,
        principal: str | None = None,
    ) -> list[Lease]:
        """Lease up to ``limit`` items to ``peer_id``, highest priority and longest available first.

        If there are none, waits up to ``wait`` seconds for the first to come, be due, or expire elsewhere; an empty
        list says that none did. Leases last ``duration`` seconds, by default the configured ``lease_duration``.
        With ``partition_key`` only items that have it are leased; what stands in line before them is passed over,
        which takes the longer the more that is.
        """
        limits.name("peer_id", peer_id, self.config.max_id_bytes)
        if partition_key is not None:
            limits.name("partition_key", partition_key, self.config.max_id_bytes)
        limits.identity(self.config, principal=principal)
        limits.count("limit", limit, self.config.max_batch)
        lasting = limits.seconds("duration", self.config.lease_duration if duration is None else duration)
        if not lasting:
            raise InvalidInput("duration", "must be above 0")
        patience = 0.0 if wait is None else limits.seconds("wait", wait) / 1_000_000
        due, asked_at = waiting.for_work(
            self._store,
            self._ns,
            patience,
            lambda unit, left: granting.grant(
                unit, peer_id, limit, lasting, self._retry, principal, left, partition_key
            ),
        )
        leases = [lease.come_from(self._origin) for granted in due.granted for lease in granting.leases(granted)]
        if leases:
            self._asked_at.remember(leases[0].token.lease_id, asked_at)
        self._forget_sometimes()
        return leases

    def hold(self, leases: Lease | Sequence[Lease], on_lost: Callable[[tuple[Lease, ...]], None] | None = None) -> Hold:
        """A context manager that keeps leases alive from a thread and knows when they can't be trusted any more."""
        hold = Hold(self, leases, on_lost, self._asked_at)
        self._holds[id(hold)] = hold
        return hold

    def heartbeat(self, tokens: Tokens, *, duration: float | None = None, principal: str | None = None) -> AckResult:
        """Make leases last ``duration`` seconds from now (by default ``lease_duration``); never shorter than before."""
        listed = limits.tokens(tokens, self.config)
        lasting = limits.seconds("duration", self.config.lease_duration if duration is None else duration)
        return self._acknowledge(
            listed, lambda claim, _, now: Heartbeat(claim, now + lasting), heartbeat=True, principal=principal
        )

    def complete(
        self, tokens: Tokens, result: Any = None, *, atomic: bool = False, principal: str | None = None
    ) -> AckResult:
        """Finish items for good. ``result`` is any JSON value for all of them, or a list with one for each token.

        A refused token changes nothing; with ``atomic=True`` one refusal refuses all. Completing again with the same
        token is accepted again and changes nothing.
        """
        listed = limits.tokens(tokens, self.config)
        results = limits.results(result, len(listed), self.config)
        return self._acknowledge(
            listed, lambda claim, own, _: Complete(claim, own), results, atomic=atomic, principal=principal
        )

    def fail(
        self,
        tokens: Tokens,
        error: BaseException | str,
        requeue: bool = True,
        delay: float | None = None,
        *,
        principal: str | None = None,
    ) -> AckResult:
        """Give items up for this attempt. They come back after ``delay`` seconds, by default an increasing pause.

        With ``requeue=False``, or once ``max_attempts`` is used up, they are dead-lettered instead. The error is kept
        with the item: an exception with its type and the end of its stack, or any text.
        """
        listed = limits.tokens(tokens, self.config)
        if not isinstance(error, str | BaseException):
            raise InvalidInput("error", f"must be an exception or a str, not {type(error).__name__}")
        text = describe(error, self.config.max_error_bytes)
        pause = None if delay is None else limits.seconds("delay", delay)
        return self._acknowledge(
            listed,
            lambda claim, _, __: Fail(claim, self._retry, requeue, pause),
            error=text or "failed without a message",
            principal=principal,
        )

    def release(self, tokens: Tokens, *, principal: str | None = None) -> AckResult:
        """Hand items back at once and without using up an attempt: the work was not begun, or was cancelled."""
        listed = limits.tokens(tokens, self.config)
        return self._acknowledge(listed, lambda claim, _, __: Release(claim), principal=principal)

    def release_owner(self, peer_id: str, *, principal: str | None = None) -> int:
        """Hand back everything that ``peer_id`` holds, as ``release`` does. Gives how many items that were."""
        limits.name("peer_id", peer_id, self.config.max_id_bytes)
        limits.identity(self.config, principal=principal)
        total, more = 0, True
        while more:
            released, more = self._run(lambda unit: acking.release_owner(unit, peer_id, 500, principal))
            total += released
        return total

    def _acknowledge(
        self,
        tokens: list[LeaseToken],
        make: acking.MakeAck,
        results: Sequence[bytes | None] | None = None,
        *,
        heartbeat: bool = False,
        atomic: bool = False,
        error: str | None = None,
        principal: str | None = None,
    ) -> AckResult:
        limits.identity(self.config, principal=principal)
        if not tokens:
            return AckResult()

        def once() -> AckResult:
            return self._run(
                lambda unit: acking.acknowledge(
                    unit,
                    tokens,
                    results or [None] * len(tokens),
                    make,
                    named=not heartbeat,
                    atomic=atomic,
                    error=error,
                    principal=principal,
                )
            )

        return once() if heartbeat else self._end(tokens, once)

    def _end(self, tokens: list[LeaseToken], act: Callable[[], AckResult]) -> AckResult:
        """End leases, and let those who hold them here know that it is meant.

        They are listed by their references, which is one step: other threads may begin to hold some meanwhile.
        """
        with ExitStack() as stack:
            holds = [hold for known in self._holds.valuerefs() if (hold := known()) is not None]
            ended = [stack.enter_context(hold.ending(tokens)) for hold in holds]
            outcome = act()
            for accepted in ended:
                accepted.extend(outcome.accepted)
            return outcome

    # Going out, and dead letters

    def drain(self, limit: int | None = None, *, principal: str | None = None) -> list[PendingItem]:
        """Take pending items out and hand them over; the queue goes on working.

        What was taken stays readable through ``drained`` for the retention time, so that a crash before the caller
        has stored the list loses nothing.
        """
        limits.identity(self.config, principal=principal)
        if limit is not None:
            limits.count("limit", limit, 2**63 - 1)
        taken: list[PendingItem] = []
        while limit is None or len(taken) < limit:
            size = 1_000 if limit is None else min(1_000, limit - len(taken))
            some = self._drain_some(size, principal)
            taken.extend(some)
            if len(some) < size:
                break
        return taken

    def _drain_some(self, size: int, principal: str | None) -> list[PendingItem]:
        return self._run(lambda unit: leaving.drain(unit, size, principal))

    def drained(self, after: int = 0, limit: int = 1_000) -> list[PendingItem]:
        """Items that were drained and not restored here, by id, for as long as they are retained."""
        return self._set_aside(State.DRAINED, after, limit)

    def dead_letters(self, after: int = 0, limit: int = 1_000) -> list[PendingItem]:
        """Dead items by id, from above ``after``, each with its error history."""
        return self._set_aside(State.DEAD, after, limit)

    def _set_aside(self, state: State, after: int, limit: int) -> list[PendingItem]:
        limits.count("limit", limit, _MOST_LISTED)
        _not_negative("after", after)
        return reading.set_aside(self._store, self._ns, state, after, limit, self.namespace, self.queue_id)

    def requeue_dead(
        self, ids: int | PendingItem | Iterable[int | PendingItem], *, principal: str | None = None
    ) -> list[int]:
        """Give dead items all of their attempts again. Gives the ids that were dead and are pending now."""
        listed = limits.ids("ids", ids, self.config)
        limits.identity(self.config, principal=principal)
        return self._run(lambda unit: leaving.requeue_dead(unit, listed, principal)) if listed else []

    def purge_dead(
        self, ids: int | PendingItem | Iterable[int | PendingItem], *, principal: str | None = None
    ) -> list[int]:
        """Forget dead items for good. Gives the ids that were dead and are gone now."""
        listed = limits.ids("ids", ids, self.config)
        limits.identity(self.config, principal=principal)
        return self._run(lambda unit: leaving.purge_dead(unit, listed, principal)) if listed else []

    # Looking

    def stats(self) -> QueueStats:
        """The queue in numbers; cheap however long it is."""
        return reading.stats(self._store, self._ns)

    def waiting(self, limit: int = 10_000) -> dict[str | None, int]:
        """How many of the first ``limit`` items in line have which partition key, the first in line first.

        These are items that could be leased now; ``None`` stands for those without a partition key.
        """
        limits.count("limit", limit, _MOST_LISTED)
        return reading.waiting(self._store, self._ns, limit)

    def events(self, after: int = 0, limit: int = 1_000) -> list[LeaseEvent]:
        """The log from above number ``after``, in order, without gaps. Empty at the end of the log only.

        Raises ``EventsPruned`` if the log no longer reaches back to there.
        """
        _not_negative("after", after)
        limits.count("limit", limit, _MOST_LISTED)
        return reading.events(self._store, self._ns, self.namespace, after, limit)

    def event_payload(self, after: int = 0, limit: int = 1_000) -> tuple[bytes, int]:
        """The same as ``events`` as JSON in the form that is published, one a line: for copying them without looking.

        The second value is how many they are.
        """
        _not_negative("after", after)
        limits.count("limit", limit, _MOST_LISTED)
        return reading.event_payload(self._store, self._ns, self.namespace, after, limit)

    def event_lines(self, after: int = 0, limit: int = 1_000) -> list[str]:
        """The same, line by line."""
        return self.event_payload(after, limit)[0].decode().split("\n")[:-1]

    def completions(
        self, after: int = 0, limit: int = 10_000, *, as_of: int | None = None
    ) -> tuple[list[Completion], int]:
        """What was completed with a result after number ``after`` (and up to ``as_of``), in the order of the log.

        The second value is how far the log was read, at least ``limit`` events further if there are as many: pass it
        as ``after`` to go on, until it no longer changes. Items that were completed together come as one.
        """
        _not_negative("after", after)
        limits.count("limit", limit, _MOST_LISTED)
        return reading.completions(self._store, self._ns, after, as_of, limit)

    def leases(self, limit: int = 1_000, *, bodies: bool = True) -> list[Lease]:
        """Leases now held by anybody, those that end soonest first.

        With ``bodies=False`` the items come without theirs, which is much cheaper where bodies are large.
        """
        limits.count("limit", limit, _MOST_LISTED)
        return reading.leases(self._store, self._ns, limit, bodies)

    def inspect(self, ids: int | Iterable[int]) -> list[ItemStatus]:
        """Where items stand: state, owner, attempts, errors, and the result of completed ones."""
        listed = limits.ids("ids", ids, self.config)
        return reading.inspect(self._store, self._ns, listed) if listed else []

    def now(self) -> datetime:
        """The time by the clock that leases go by: the server's on PostgreSQL, the machine's on SQLite."""
        return to_datetime(self._store.read_now())

    def readers(self) -> dict[str, int]:
        """How far each registered reader of the log has come."""
        return reading.readers(self._store, self._ns)

    # Tending

    def sweep(self) -> SweepResult:
        """End leases that have run out and forget finished items past their retention.

        Nothing depends on it: leasing takes over expired work by itself. It only makes both visible sooner.
        """
        expired = dead = 0
        more = True
        while more:
            ended, died, more = self._run(self._expire_some)
            expired, dead = expired + ended, dead + died
        return SweepResult(expired, dead, self._forget_finished(steps=None))

    def _expire_some(self, unit: Unit) -> tuple[int, int, bool]:
        unit.fetch()
        [rows] = unit.fetch(granting.expired_by(self._ns, unit.now))
        ended = granting.take_over(unit, rows, self._retry, None)
        died = sum(len(span) for span in ended if span.state is State.DEAD)
        return sum(map(len, ended)), died, len(rows) == granting.EXPIRED_AT_ONCE

    def _forget_sometimes(self) -> None:
        """Let leasing pay a little of the upkeep, so that a queue nobody sweeps does not grow for ever."""
        if time.monotonic() < self._forget_at or not self._forgetting.acquire(blocking=False):
            return
        try:
            self._forget_at = time.monotonic() + _FORGET_EVERY
            with suppress(LeaseError):  # trouble with the upkeep must not keep granted leases from the caller
                self._forget_finished(steps=10)
        finally:
            self._forgetting.release()

    def _forget_finished(self, steps: int | None) -> int:
        total, more = 0, True
        kept = round(self.config.retention * 1_000_000)
        while more and (steps is None or steps > 0):
            forgotten, more = self._run(lambda unit: retention.forget_finished(unit, kept))
            total += forgotten
            steps = None if steps is None else steps - 1
        return total

    def prune_events(self, *, before: int | None = None, older_than: float | None = None) -> int:
        """Delete events numbered below ``before`` and older than ``older_than`` seconds, in small transactions.

        Never past what a registered reader has yet to read. Events that were written together go together, so a few
        below the bound may stay. Gives the number of the last event that is gone.
        """
        if before is None and older_than is None:
            raise InvalidInput("before", "give before= (a sequence number), older_than= (seconds), or both")
        if before is not None:
            _not_negative("before", before)
        age = None if older_than is None else limits.seconds("older_than", older_than)
        upto, more = 0, True
        while more:
            upto, more = self._keep(lambda unit: retention.prune_log(unit, before, age))
        return upto

    def register_reader(self, name: str, after: int = 0) -> int:
        """Keep the log from above ``after`` for the reader ``name``, until it moves on. Gives where it stands.

        A reader that is registered already keeps its place.
        """
        limits.name("name", name, self.config.max_id_bytes)
        _not_negative("after", after)
        return self._keep(lambda unit: retention.register_reader(unit, name, after))

    def advance_reader(self, name: str, to: int) -> None:
        """Say that ``name`` has read up to number ``to``, so that the log below may be pruned. Never moves back."""
        limits.name("name", name, self.config.max_id_bytes)
        _not_negative("to", to)
        self._keep(lambda unit: retention.advance_reader(unit, name, to))

    def drop_reader(self, name: str) -> None:
        """Forget the reader ``name``: the log no longer waits for it."""
        limits.name("name", name, self.config.max_id_bytes)
        self._keep(lambda unit: retention.drop_reader(unit, name))

    def _run(self, work: Callable[[Unit], T]) -> T:
        return run(self._store, self._ns, work)

    def _keep(self, work: Callable[[Unit], T]) -> T:
        """The same for what changes no item, which a sealed copy does, too."""
        return run(self._store, self._ns, work, SealedUnit)


def _not_negative(where: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise InvalidInput(where, f"must be a whole number, 0 or more (got {value!r})")
