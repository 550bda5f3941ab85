"""SQLite: one file (or memory), write-ahead log, one writer at a time.

The lock is SQLite's own: ``BEGIN IMMEDIATE``. Waiting for it is done here with short random sleeps, because SQLite's
built-in waiting backs off to a tenth of a second while the file is free. Threads of this process queue on a mutex.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool

from lease_core import sqlite_file
from lease_core.config import QueueConfig
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
from lease_core.store.base import HEAD_COLUMNS, Bell, Clock, Head, Query, Row, SpanMoved, Store, Transaction

T = TypeVar("T")

_INSERT_ITEM = (
    "INSERT INTO omnirelay_item "
    "(id, enqueued_at, resource_type, resource_id, partition_key, request_id, extra, body, ns) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_LOG = "INSERT INTO omnirelay_log (ns, last, first, at, nonce, document) VALUES (?, ?, ?, ?, ?, ?)"
_HEAD = f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE ns = ?"


class SqliteStore(Store):
    member = "IN (SELECT value FROM json_each(?))"
    lateral = False
    registers_waiters = False

    def __init__(self, url: sa.URL, config: QueueConfig, clock: Clock | None) -> None:
        self.in_memory = sqlite_file.in_memory(url)
        self.mutex = threading.RLock()
        sqlite_file.check_folder(url)
        super().__init__(url, config, clock)
        self._bell: MemoryBell | FileBell = MemoryBell() if self.in_memory else FileBell(self)
        if not self.in_memory:
            sqlite_file.let_go_before_forks(self)

    def _engine(self) -> sa.Engine:
        settings: dict[str, Any] = {"check_same_thread": False, "timeout": 0, "isolation_level": None}
        if self.in_memory:
            engine = sa.create_engine(self.url, poolclass=StaticPool, connect_args=settings)
        else:
            engine = sa.create_engine(
                self.url, poolclass=QueuePool, pool_size=8, max_overflow=-1, connect_args=settings
            )
        sa.event.listen(engine, "connect", self._prepare)
        return engine

    def _prepare(self, connection: sqlite3.Connection, _entry: ConnectionPoolEntry) -> None:
        level = "FULL" if self.config.durability == "full" else "NORMAL"
        self.patiently(lambda: connection.execute(f"PRAGMA synchronous = {level}"))
        if not self.in_memory:
            self.patiently(lambda: sqlite_file.write_ahead(connection))

    def translated(self, error: Exception) -> LeaseError:
        return translated(error)

    def pack(self, values: Sequence[Any]) -> str:
        return msgspec.json.encode(list(values)).decode()

    def begin(self, ns: int) -> SqliteTransaction:
        return SqliteTransaction(self, ns)

    def joined(self, ns: int, connection: Any) -> JoinedSqliteTransaction:
        return JoinedSqliteTransaction(self, ns, connection)

    def read(self, *queries: Query) -> list[list[Row]]:
        self.check_usable()
        try:
            with self.mutex:
                pooled = self.take()
                try:
                    connection: Any = pooled.driver_connection
                    return self.patiently(lambda: _read(connection, queries))
                finally:
                    self.put_back(pooled)
        except (sqlite3.Error, sa.exc.DBAPIError) as error:
            raise self.translated(error) from error

    def create_namespace(self, namespace: str, queue_id: str) -> None:
        self.read(
            Query(
                "INSERT OR IGNORE INTO omnirelay_head (namespace, queue_id) VALUES (?, ?)",
                (namespace, queue_id),
            )
        )

    def read_now(self) -> int:
        return time.time_ns() // 1000 if self.clock is None else round(self.clock() * 1_000_000)

    def patiently(self, act: Callable[[], T]) -> T:
        """Do ``act`` as soon as no other process is in the way, for as long as the configuration allows."""
        return sqlite_file.patiently(act, self.config.store_timeout)

    def bell(self, ns: int) -> Bell:
        return self._bell

    @property
    def guard(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.mutex

    def let_go(self) -> None:
        """Close all idle connections; to be called with the mutex held, when there are no others."""
        if self.closed:
            return
        self._bell.close()
        self._put_down()
        self.engine.dispose()

    def after_fork(self) -> None:
        if self.in_memory:
            raise QueueClosed("an in-memory queue stays with the process that opened it; use a file to share one")

    def close(self) -> None:
        if not self.closed:
            self._bell.close()
        super().close()


def _read(connection: Any, queries: Sequence[Query]) -> list[list[Row]]:
    """All queries on the same state of the database."""
    if len(queries) == 1:
        return [connection.execute(*queries[0]).fetchall()]
    connection.execute("BEGIN")
    try:
        return [connection.execute(*query).fetchall() for query in queries]
    finally:
        connection.rollback()


class SqliteTransaction(Transaction):
    def __init__(self, store: SqliteStore, ns: int) -> None:
        super().__init__(ns)
        self.store = store
        self._connection: Any = None
        self._pooled: Any = None

    def __enter__(self) -> SqliteTransaction:
        return self

    def fetch(self, *queries: Query) -> list[list[Row]]:
        try:
            if self._connection is None:
                self._begin()
            execute = self._connection.execute
            return [execute(*query).fetchall() for query in queries]
        except (sqlite3.Error, sa.exc.DBAPIError) as error:
            raise translated(error) from error

    def _begin(self) -> None:
        self._pooled = self.store.take()
        connection: Any = self._pooled.driver_connection
        if connection.in_transaction:
            connection.rollback()  # whoever had it last was interrupted
        self.store.patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        self._connection = connection
        self._locked()

    def _locked(self) -> None:
        self.head = Head(*self._connection.execute(_HEAD, (self.ns,)).fetchone())
        self.now = self.store.read_now()
        self.store.reach("locked")

    def log(self, first: int, last: int, document: bytes, at: int) -> None:
        self.write(_INSERT_LOG, (self.ns, last, first, at, 0, document))

    def notify(self) -> None:
        """Nothing to do: sleepers watch the file."""

    def flush(self) -> None:
        execute = self._connection.execute
        if self.items:
            self._connection.executemany(_INSERT_ITEM, [(*row, self.ns) for row in self.items])
        in_order = sorted(self.writes, key=lambda write: write.last)
        for at, (sql, params, expect, _) in enumerate(in_order):
            if at == len(in_order) // 2:
                self.store.reach("half-written")
            touched = execute(sql, params).rowcount
            if expect is not None and touched != expect:
                raise SpanMoved(f"{touched} rows were touched where {expect} should have been")

    def commit(self) -> None:
        if not (self.writes or self.items):
            return
        try:
            self.flush()
            self.store.reach("before-commit")
            self._connection.execute("COMMIT")
        except (sqlite3.Error, sa.exc.DBAPIError) as error:
            raise translated(error) from error
        self.store.reach("after-commit")
        if isinstance(self.store._bell, MemoryBell):
            self.store._bell.ring()

    def __exit__(self, *_: object) -> None:
        if self._pooled is not None:
            connection: Any = self._pooled.driver_connection
            if connection.in_transaction:
                connection.rollback()
            self.store.put_back(self._pooled)


class JoinedSqliteTransaction(SqliteTransaction):
    """Writes inside of the caller's transaction; the caller commits or rolls back."""

    def __init__(self, store: SqliteStore, ns: int, connection: Any) -> None:
        super().__init__(store, ns)
        self._given = connection

    def _begin(self) -> None:
        connection = self._given
        if not isinstance(connection, sqlite3.Connection):
            raise InvalidInput(
                "connection", f"must be a SQLAlchemy or sqlite3 connection, not {type(connection).__name__}"
            )
        if not connection.in_transaction:
            self.store.patiently(lambda: connection.execute("BEGIN IMMEDIATE"))
        else:  # a transaction that has only read so far gets the write lock here, or fails
            connection.execute("UPDATE omnirelay_head SET number = number WHERE ns = ?", (self.ns,))
        self._connection = PlainRows(connection)
        self._locked()

    def commit(self) -> None:
        try:
            self.flush()
        except sqlite3.Error as error:
            raise translated(error) from error

    def __exit__(self, *_: object) -> None:
        pass


class PlainRows:
    """Somebody's connection, with rows as plain tuples whatever they have set it to."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, params: Sequence[Any] = ()) -> sqlite3.Cursor:
        return self._cursor().execute(sql, params)

    def executemany(self, sql: str, rows: Sequence[Row]) -> sqlite3.Cursor:
        return self._cursor().executemany(sql, rows)

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor()
        cursor.row_factory = None
        return cursor


class MemoryBell:
    """For a queue in memory: every commit of this process rings."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rung = 0

    def listen(self) -> int:
        return self._rung

    def ring(self) -> None:
        with self._changed:
            self._rung += 1
            self._changed.notify_all()

    def wait(self, mark: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._rung != mark, seconds)

    def close(self) -> None:
        self.ring()


class FileBell:
    """For a file: asks SQLite whether another connection has written, some microseconds' work, 30 times a second."""

    _PERIOD = 0.03

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._pooled: Any = None
        self._opened = 0  # versions can only be compared on the connection they were read from

    def listen(self) -> tuple[int, int]:
        with self._store.mutex:
            if self._pooled is None:
                self._pooled = self._store.engine.raw_connection()
                self._opened += 1
            connection: Any = self._pooled.driver_connection
            try:
                version: int = self._store.patiently(lambda: connection.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.Error as error:
                raise translated(error) from error
            return self._opened, version

    def wait(self, mark: tuple[int, int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        pause = 0.002
        while not self._store.closed and self.listen() == mark:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, self._PERIOD)

    def close(self) -> None:
        with self._store.mutex:
            if self._pooled is not None:
                self._pooled.close()
                self._pooled = None


def translated(error: Exception) -> LeaseError:
    """The driver's error as one of ours, with what to do about it."""
    cause: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusy(
            f"another writer held the database for too long ({cause}). Nothing was written; repeat the call, or raise "
            "store_timeout. In a transaction of your own, start it with BEGIN IMMEDIATE."
        )
    if code == sqlite3.SQLITE_READONLY:
        return StoreReadOnly(f"the database cannot be written ({cause}): check the file's and its folder's permissions")
    if code == sqlite3.SQLITE_FULL:
        return StoreFull(f"no space is left for the database ({cause}). Nothing was written; free space and repeat")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return StoreUnavailable(f"the database cannot be used ({cause}): check path, permissions and file")
    return StoreError(f"the database refused a statement: {cause}")
