"""Outcomes kept in the queue's own database, where the token is checked in the transaction that writes them.

The tables are those of ``lease_core.deterministic.sql_state``, made when a lease's effects are first used.
"""

from __future__ import annotations

from itertools import chain

import sqlalchemy as sa

from lease_core.deterministic import sql_state
from lease_core.deterministic.effects import EffectStore, LeaseEffects
from lease_core.deterministic.errors import StaleFence
from lease_core.deterministic.state import Fence, StateStore
from lease_core.errors import InvalidInput
from lease_core.machine import Claim, Heartbeat, Moved, Refused, decide
from lease_core.model import Lease, LeaseToken
from lease_core.store import selects
from lease_core.store.base import Query, Store
from lease_core.unit import Unit, run

_SELECT = "SELECT value FROM omnirelay_state WHERE key = ?"
_ADD = "INSERT INTO omnirelay_state (key, value) VALUES (?, ?) ON CONFLICT (key) DO NOTHING"
_PUT = "INSERT INTO omnirelay_state (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
_REMOVE = "DELETE FROM omnirelay_state WHERE key = ?"


def check(unit: Unit, token: LeaseToken) -> None:
    """Raise ``StaleFence`` unless the token is good now. Holds until the unit's transaction ends."""
    at = token.sequence_id
    rows = unit.fetch(*selects.overlapping(unit.store, unit.transaction.ns, [(at, at)]))
    unit.load(chain.from_iterable(rows))
    [(_, _, span)] = unit.parts(at, at)
    claim = Claim(token.attempt, token.lease_id, token.fence)
    outcome = decide(span and span.cut(at, at), Heartbeat(claim, unit.now), unit.now)
    if not isinstance(outcome, Moved):
        reason = outcome.reason if isinstance(outcome, Refused) else "the lease has ended"
        raise StaleFence(f"item {at}: {reason}. Nothing was recorded; stop")


class QueueStateStore(StateStore):
    """A state store in a queue's database. A fenced write is refused unless its token is the current one."""

    checks_tokens = True

    def __init__(self, store: Store, ns: int, queue_id: str) -> None:
        self._store = store
        self._ns = ns
        self._queue_id = queue_id
        self._made = False

    def _ready(self) -> Store:
        self._store.check_usable()
        if not self._made:
            make_tables(self._store)
            self._made = True
        return self._store

    def _read(self, key: str) -> bytes | None:
        [rows] = self._ready().read(Query(_SELECT, (key,)))
        return str(rows[0][0]).encode() if rows else None

    def _write(self, key: str, raw: bytes, fence: Fence | None) -> None:
        def work(unit: Unit) -> None:
            self._check(unit, fence)
            unit.transaction.write(_PUT, (key, raw.decode()))

        run(self._ready(), self._ns, work)

    def _insert(self, key: str, raw: bytes, fence: Fence | None) -> tuple[bytes, bool]:
        def work(unit: Unit) -> tuple[bytes, bool]:
            self._check(unit, fence)
            [rows] = unit.fetch(Query(_SELECT, (key,)))
            if rows:
                return str(rows[0][0]).encode(), False
            # who writes here by another way does not wait for the queue's lock: with no row touched, look again
            unit.transaction.write(_ADD, (key, raw.decode()), 1)
            return raw, True

        return run(self._ready(), self._ns, work)

    def _claim(self, fence: Fence) -> None:
        run(self._store, self._ns, lambda unit: self._check(unit, fence))

    def _delete(self, key: str) -> bool:
        def work(unit: Unit) -> bool:
            [rows] = unit.fetch(Query(_SELECT, (key,)))
            unit.transaction.write(_REMOVE, (key,))
            return bool(rows)

        return run(self._ready(), self._ns, work)

    def _check(self, unit: Unit, fence: Fence | None) -> None:
        if fence is None:
            unit.fetch()
            return
        if not fence.scope.startswith(f"item/{self._queue_id}/"):
            raise InvalidInput("lease", "is not of this queue, whose database the effect is to be recorded in")
        check(unit, fence.token)


class Origin:
    """Where a lease came from: what it needs of its queue for ``lease.effects``."""

    def __init__(self, store: Store, ns: int, queue_id: str, effects: StateStore | None) -> None:
        self.queue_id = queue_id
        self._store = store
        self._ns = ns
        self._effects = EffectStore(effects or QueueStateStore(store, ns, queue_id))

    def check(self, token: LeaseToken) -> None:
        """Raise ``StaleFence`` unless the token is good now."""
        run(self._store, self._ns, lambda unit: check(unit, token))

    def effects(self, lease: Lease) -> LeaseEffects:
        return self._effects.leased(lease)


def has_tables(store: Store) -> bool:
    """Whether outcomes were ever recorded in this database."""
    store.check_usable()
    with store.guard, store.engine.connect() as connection:
        return all(map(sa.inspect(connection).has_table, sql_state.metadata.tables))


def make_tables(store: Store) -> None:
    """Make the tables for outcomes in a queue's database, if they are missing."""

    def make() -> None:
        if has_tables(store):
            return
        with store.guard, store.engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.dialect.name == "sqlite" else "BEGIN")
            try:
                sql_state.make_tables(connection)
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise

    try:
        store.patiently(make)
    except sa.exc.DBAPIError as error:
        raise store.translated(error) from error
