"""State in a SQL database: SQLite or PostgreSQL, in two small tables that are made when they are missing.

They are apart from the queue's: any database will do, and where it is the queue's own, ``lease.effects`` writes to them
in the transaction that checks the token.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.pool import StaticPool

from lease_core import database_url, sqlite_file
from lease_core.deterministic.state import Fence, StateStore
from lease_core.errors import (
    InvalidInput,
    LeaseError,
    QueueClosed,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)

metadata = sa.MetaData()
values = sa.Table(
    "omnirelay_state",
    metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
fences = sa.Table(
    "omnirelay_state_fence",
    metadata,
    sa.Column("scope", sa.Text, primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
)

_LOCK = 7_166_359_215  # any number: who makes the tables holds it, for PostgreSQL cannot make one twice at once
_BUSY, _READONLY, _FULL = (5, 6), 8, 13  # SQLite's result codes


class SqlStateStore(StateStore):
    """For whatever shares the database. ``within(connection)`` writes inside of a transaction of the caller's."""

    def __init__(self, url: str | sa.URL, timeout: float = 10.0) -> None:
        self.url = database_url.parsed(url)
        self._sqlite = self.url.get_backend_name() == "sqlite"
        self._in_memory = self._sqlite and sqlite_file.in_memory(self.url)
        self.mutex: Any = threading.RLock() if self._sqlite else nullcontext()
        self._pid = os.getpid()
        self.engine = self._sqlite_engine(timeout) if self._sqlite else self._postgres_engine(timeout)
        try:
            with _translated():
                self._make_tables()
        except BaseException:
            self.engine.dispose()
            raise

    def __repr__(self) -> str:
        return f"SqlStateStore({database_url.shown(self.url)!r})"

    def _sqlite_engine(self, timeout: float) -> sa.Engine:
        """One connection, used by one thread at a time: SQLite has one writer anyway."""
        sqlite_file.check_folder(self.url)
        settings = {"check_same_thread": False, "timeout": timeout, "isolation_level": None}
        engine = sa.create_engine(self.url, poolclass=StaticPool, connect_args=settings)
        sa.event.listen(engine, "connect", lambda connection, _: _prepare_sqlite(connection, self._in_memory, timeout))
        if not self._in_memory:
            sqlite_file.let_go_before_forks(self)
        return engine

    def _postgres_engine(self, timeout: float) -> sa.Engine:
        try:
            engine = sa.create_engine(
                self.url.set(drivername="postgresql+psycopg"),
                isolation_level="READ COMMITTED",
                pool_pre_ping=True,
                connect_args={} if "connect_timeout" in self.url.query else {"connect_timeout": max(2, round(timeout))},
            )
        except ImportError as error:
            raise StoreUnavailable(
                f"url: PostgreSQL needs psycopg ({error}); pip install 'omnirelay-dagster[postgres]'"
            ) from error
        patience = f"SET synchronous_commit = on; SET lock_timeout = {round(timeout * 1000)}"
        sa.event.listen(engine, "connect", lambda connection, _: _prepare_postgres(connection, patience))
        return engine

    def _make_tables(self) -> None:
        with self.engine.connect() as connection:
            if all(map(sa.inspect(connection).has_table, metadata.tables)):
                return
        with self._transaction() as connection:
            make_tables(connection)

    def within(self, connection: sa.Connection) -> StateStore:
        """This store inside of the caller's transaction on the same database: what is written lasts if, and only if,
        that transaction is committed."""
        if not isinstance(connection, sa.Connection):
            raise InvalidInput("connection", f"must be a SQLAlchemy connection, not {type(connection).__name__}")
        return _JoinedStateStore(connection)

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        self._check_usable()
        with _translated(), self.mutex, self.engine.connect() as connection:
            if self._sqlite:  # the lock is taken at once: one that is taken after reading can come too late
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
            connection.commit()

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        self._check_usable()
        with _translated(), self.mutex, self.engine.connect() as connection:
            yield connection

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            if self._in_memory:
                raise QueueClosed("a store in memory stays with the process that opened it; use a file to share one")
            if not self._sqlite:
                self.engine.dispose(close=False)  # the parent's connections are the parent's
            self._pid = os.getpid()

    def _read(self, key: str) -> bytes | None:
        with self._reading() as connection:
            return _select(connection, key)

    def _write(self, key: str, raw: bytes, fence: Fence | None) -> None:
        with self._transaction() as connection:
            _advance(connection, fence)
            insert = _insert_into(connection, values).values(key=key, value=raw.decode())
            connection.execute(
                insert.on_conflict_do_update(index_elements=["key"], set_={"value": insert.excluded.value})
            )

    def _insert(self, key: str, raw: bytes, fence: Fence | None) -> tuple[bytes, bool]:
        while True:
            with self._transaction() as connection:
                _advance(connection, fence)
                insert = _insert_into(connection, values).values(key=key, value=raw.decode())
                if connection.execute(insert.on_conflict_do_nothing().returning(values.c.key)).first() is not None:
                    return raw, True
                there = _select(connection, key)
            if there is not None:  # else it was removed since; add again
                return there, False

    def _claim(self, fence: Fence) -> None:
        with self._transaction() as connection:
            _advance(connection, fence)

    def _delete(self, key: str) -> bool:
        with self._transaction() as connection:
            return connection.execute(sa.delete(values).where(values.c.key == key)).rowcount == 1

    def let_go(self) -> None:
        """Close the connection; called with the mutex held. The next use opens another."""
        self.engine.dispose()

    def close(self) -> None:
        self.engine.dispose(close=os.getpid() == self._pid)


class _JoinedStateStore(SqlStateStore):
    joined = True

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def __repr__(self) -> str:
        return "SqlStateStore.within(...)"

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with _translated():
            yield self._connection

    _reading = _transaction

    def close(self) -> None:
        """The connection is the caller's."""


def make_tables(connection: sa.Connection) -> None:
    """Make the tables that are missing, in the connection's transaction."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    metadata.create_all(connection)


def _advance(connection: sa.Connection, fence: Fence | None) -> None:
    """Raise the scope's mark to this fence, or refuse; the row stays locked until the transaction ends."""
    if fence is None:
        return
    insert = _insert_into(connection, fences).values(scope=fence.scope, fence=fence.number)
    newer = insert.on_conflict_do_update(
        index_elements=["scope"], set_={"fence": insert.excluded.fence}, where=fences.c.fence <= insert.excluded.fence
    )
    if connection.execute(newer.returning(fences.c.fence)).first() is None:
        seen = connection.execute(sa.select(fences.c.fence).where(fences.c.scope == fence.scope)).scalar_one()
        raise fence.refusal(int(seen))


def _insert_into(connection: sa.Connection, table: sa.Table) -> Any:
    return (sqlite_dialect if connection.dialect.name == "sqlite" else postgresql).insert(table)


def _select(connection: sa.Connection, key: str) -> bytes | None:
    found = connection.execute(sa.select(values.c.value).where(values.c.key == key)).scalar()
    return None if found is None else str(found).encode()


def _prepare_sqlite(connection: sqlite3.Connection, in_memory: bool, timeout: float) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    if not in_memory:
        sqlite_file.patiently(lambda: sqlite_file.write_ahead(connection), timeout)


def _prepare_postgres(connection: Any, settings: str) -> None:
    before = connection.autocommit
    connection.autocommit = True
    connection.execute(settings)
    connection.autocommit = before


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        raise _translation(error) from error


def _translation(error: sa.exc.DBAPIError) -> LeaseError:
    cause: Any = error.orig
    code, state = getattr(cause, "sqlite_errorcode", 0) & 0xFF, getattr(cause, "sqlstate", None)
    if code in _BUSY or state == "55P03":
        return StoreBusy(f"another writer held the database for too long ({cause}). Nothing was written; repeat")
    if code == _READONLY or state in ("25006", "42501"):
        return StoreReadOnly(f"the database cannot be written ({cause}): connect as a user, or to a server, that may")
    if code == _FULL or state == "53100":
        return StoreFull(f"no space is left for the database ({cause}). Nothing was written; free space and repeat")
    if isinstance(error, sa.exc.OperationalError | sa.exc.InterfaceError):
        return StoreUnavailable(f"the database cannot be used ({cause}); repeat the call when it is back")
    return StoreError(f"the database refused a statement: {cause}")
