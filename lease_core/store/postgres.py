"""PostgreSQL, for many machines. Time is the server's; the lock is the namespace's head row.

An operation is two round trips: one that begins, locks the head row and reads, one that writes and commits. Statements
travel in psycopg's pipeline mode. Every statement after the lock takes its own snapshot (READ COMMITTED), so it sees
all that was committed before the lock was had.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.types.numeric import Int8BinaryDumper
from sqlalchemy.pool import ConnectionPoolEntry

from lease_core.config import QueueConfig
from lease_core.errors import LeaseError, StoreBusy, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from lease_core.store.base import (
    HEAD_COLUMNS,
    Bell,
    Clock,
    CommitInDoubt,
    ConnectionLost,
    Head,
    Query,
    Row,
    SpanMoved,
    Store,
    Transaction,
)

_CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_LOCK = f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE ns = %s FOR UPDATE"
_NOW = f"SELECT {_CLOCK}"
_INSERT_LOG = "INSERT INTO omnirelay_log (ns, last, first, at, nonce, document) VALUES (%s, %s, %s, %s, %s, %s)"
_ITEM_COLUMNS = (
    ("id", "bigint"),
    ("enqueued_at", "bigint"),
    ("resource_type", "text"),
    ("resource_id", "text"),
    ("partition_key", "text"),
    ("request_id", "text"),
    ("extra", "text"),
    ("body", "bytea"),
)
_EXPECTATION_FAILED = "22P02"

# The planner has no statistics for a young table and keeps plans made for an empty one; every statement here is
# written for an index, so anything else is never right.
_SETTINGS = """
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_bitmapscan = off;
    SET jit = off; SET plan_cache_mode = force_generic_plan;
    SET idle_in_transaction_session_timeout = '60s'
"""


class PostgresStore(Store):
    member = "= ANY(?)"
    lateral = True
    registers_waiters = True

    def __init__(self, url: sa.URL, config: QueueConfig, clock: Clock | None) -> None:
        super().__init__(url, config, clock)
        self._bells: dict[int, PostgresBell] = {}
        self._bells_lock = threading.Lock()
        self._forms: dict[str, str] = {}

    def _engine(self) -> sa.Engine:
        engine = sa.create_engine(
            self.url.set(drivername="postgresql+psycopg"),
            isolation_level="AUTOCOMMIT",
            pool_size=8,
            max_overflow=-1,
            connect_args={"connect_timeout": max(2, round(self.config.store_timeout))},
        )
        sa.event.listen(engine, "connect", self._prepare)
        return engine

    def _prepare(self, connection: psycopg.Connection[Row], _entry: ConnectionPoolEntry) -> None:
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        connection.prepared_max = 500
        before = connection.autocommit
        connection.autocommit = True
        durable = "on" if self.config.durability == "full" else "off"
        patience = round(self.config.store_timeout * 1000)
        connection.execute(f"{_SETTINGS}; SET synchronous_commit = {durable}; SET lock_timeout = {patience}")
        connection.autocommit = before

    def form(self, sql: str) -> str:
        """The statement with psycopg's marks."""
        form = self._forms.get(sql)
        if form is None:
            form = self._forms[sql] = sql.replace("?", "%s")
        return form

    def pack(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def connect(self) -> Any:
        try:
            return self.engine.raw_connection()
        except (psycopg.OperationalError, sa.exc.OperationalError) as error:
            raise ConnectionLost from error

    def begin(self, ns: int) -> PostgresTransaction:
        return PostgresTransaction(self, ns)

    def joined(self, ns: int, connection: Any) -> JoinedPostgresTransaction:
        return JoinedPostgresTransaction(self, ns, connection)

    def read(self, *queries: Query) -> list[list[Row]]:
        self.check_usable()

        # a pool may hold connections that a restart has killed: each is met once, then replaced
        for _ in range(self.engine.pool.size() + 2):  # type: ignore[attr-defined]
            try:
                return self._read_once(queries)
            except ConnectionLost as lost:
                cause = lost.__cause__
        raise StoreUnavailable(f"the database cannot be reached ({cause}); repeat the call when it is back") from cause

    def _read_once(self, queries: Sequence[Query]) -> list[list[Row]]:
        pooled = self.connect()
        connection: Any = pooled.driver_connection
        try:
            return [connection.execute(self.form(sql), params).fetchall() for sql, params in queries]
        except psycopg.Error as error:
            raise self._failed(pooled, connection, error) from error
        finally:
            pooled.close()

    def _failed(self, pooled: Any, connection: Any, error: psycopg.Error) -> Exception:
        if connection.closed or isinstance(
            error, psycopg.errors.AdminShutdown | psycopg.errors.IdleInTransactionSessionTimeout
        ):
            pooled.invalidate()
            return ConnectionLost()
        return translated(error)

    def create_namespace(self, namespace: str, queue_id: str) -> None:
        sql = "INSERT INTO omnirelay_head (namespace, queue_id) VALUES (?, ?) ON CONFLICT DO NOTHING RETURNING 1"
        self.read(Query(sql, (namespace, queue_id)))

    def read_now(self) -> int:
        if self.clock is not None:
            return round(self.clock() * 1_000_000)
        [[row]] = self.read(Query(_NOW))
        return int(row[0])

    def bell(self, ns: int) -> Bell:
        with self._bells_lock:
            if ns not in self._bells:
                self._bells[ns] = PostgresBell(self, ns)
            return self._bells[ns]

    def after_fork(self) -> None:
        super().after_fork()
        self._bells_lock = threading.Lock()
        self._bells = {}

    def close(self) -> None:
        if not self.closed:
            for bell in self._bells.values():
                bell.close()
        super().close()


class PostgresTransaction(Transaction):
    def __init__(self, store: PostgresStore, ns: int) -> None:
        super().__init__(ns)
        self.store = store
        self._notifies = False
        self._logged: tuple[int, int] | None = None
        self._pooled: Any = None
        self._connection: Any = None
        self._done = False

    def __enter__(self) -> PostgresTransaction:
        return self

    def fetch(self, *queries: Query) -> list[list[Row]]:
        if self._connection is None:
            return self._begin(queries)
        try:
            with self._connection.pipeline():
                cursors = [
                    self._connection.execute(self.store.form(sql), params, prepare=True) for sql, params in queries
                ]
            return [cursor.fetchall() for cursor in cursors]
        except psycopg.Error as error:
            raise self._failed(error) from error

    def _begin(self, queries: Sequence[Query]) -> list[list[Row]]:
        self._pooled = self.store.connect()
        self._connection = self._pooled.driver_connection
        return self._lock(queries, _BEGIN)

    def _lock(self, queries: Sequence[Query], begin: str | None) -> list[list[Row]]:
        connection = self._connection
        form = self.store.form
        try:
            with connection.pipeline():
                if begin is not None:
                    connection.execute(begin)
                head = connection.execute(_LOCK, (self.ns,), prepare=True)
                cursors = [connection.execute(form(sql), params, prepare=True) for sql, params in queries]
                # the time is taken last: nothing that was read can be younger than it
                clock = connection.execute(_NOW, prepare=True) if self.store.clock is None else None
            self.head = Head(*head.fetchone())
            self.now = self.store.read_now() if clock is None else clock.fetchone()[0]
            rows = [cursor.fetchall() for cursor in cursors]
        except psycopg.Error as error:
            raise self._failed(error) from error
        self.store.reach("locked")
        return rows

    def log(self, first: int, last: int, document: bytes) -> None:
        nonce = secrets.randbits(62)
        self._logged = (last, nonce)
        self.write(_INSERT_LOG, (self.ns, last, first, self.now, nonce, document))

    def notify(self) -> None:
        self._notifies = True

    def flush(self) -> None:
        """Send everything; to be called in pipeline mode."""
        execute = self._connection.execute
        if self.items:
            execute(*_item_insert(self.ns, self.items), prepare=True)
        for sql, params, expect in self.writes:
            form = self.store.form(sql)
            if expect is not None:
                form = _expecting(form, expect)
            execute(form, params, prepare=True)
        if self._notifies:
            execute("SELECT pg_notify(%s, '')", (channel(self.ns),), prepare=True)

    def commit(self) -> None:
        if not (self.writes or self.items):
            return
        if self.store.probe is not None:
            self.store.reach("half-written")
        sent = False
        try:
            with self._connection.pipeline() as pipeline:
                self.flush()
                if self.store.probe is not None:
                    pipeline.sync()
                    self.store.reach("before-commit")
                sent = True
                self._connection.execute("COMMIT")
        except psycopg.Error as error:
            failure = self._failed(error)
            if sent and isinstance(failure, ConnectionLost) and self._logged:
                raise CommitInDoubt(*self._logged) from error
            raise failure from error
        self._done = True
        self.store.reach("after-commit")

    def _failed(self, error: psycopg.Error) -> Exception:
        if error.sqlstate == _EXPECTATION_FAILED:
            return SpanMoved(str(error))
        if isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure):
            return ConnectionLost()  # nothing happened and running again is right, as after a lost connection
        return self.store._failed(self._pooled, self._connection, error)

    def __exit__(self, *_: object) -> None:
        if self._pooled is None or self._pooled.driver_connection is None:
            return
        try:
            if not self._done and not self._connection.closed:
                self._connection.execute("ROLLBACK")
        except psycopg.Error:  # a connection that cannot even roll back is thrown away; the server does it for us
            self._pooled.invalidate()
        finally:
            self._pooled.close()


class JoinedPostgresTransaction(PostgresTransaction):
    """Writes inside of the caller's transaction; the caller commits or rolls back."""

    def __init__(self, store: PostgresStore, ns: int, connection: Any) -> None:
        super().__init__(store, ns)
        self._given = connection

    def _begin(self, queries: Sequence[Query]) -> list[list[Row]]:
        self._connection = self._given
        return self._lock(queries, None)

    def _failed(self, error: psycopg.Error) -> Exception:
        return translated(error)

    def commit(self) -> None:
        try:
            with self._connection.pipeline():
                self.flush()
        except psycopg.Error as error:
            raise translated(error) from error

    def __exit__(self, *_: object) -> None:
        pass


def _item_insert(ns: int, rows: list[Row]) -> tuple[str, list[Any]]:
    """One statement for all rows. A column that is the same in every row travels once."""
    chosen, arrays, names, params = [], [], [], []
    uniform: list[Any] = [ns]
    for (name, kind), values in zip(_ITEM_COLUMNS, zip(*rows, strict=True), strict=True):
        if name != "id" and values.count(values[0]) == len(values):
            chosen.append(f"%s::{kind}")
            uniform.append(values[0])
        else:
            chosen.append(f"u.{name}")
            arrays.append(f"%s::{kind}[]")
            names.append(name)
            params.append(list(values))
    columns = ", ".join(name for name, _ in _ITEM_COLUMNS)
    sql = (
        f"INSERT INTO omnirelay_item (ns, {columns}) SELECT %s::integer, {', '.join(chosen)} "
        f"FROM unnest({', '.join(arrays)}) AS u({', '.join(names)})"
    )
    return sql, uniform + params


def _expecting(sql: str, count: int) -> str:
    """The statement, failing by itself unless it touches ``count`` rows: no round trip is needed to find out."""
    return (
        f"WITH touched AS ({sql} RETURNING 1) "
        f"SELECT CASE WHEN count(*) = {int(count)} THEN 1 ELSE (count(*) || ' rows touched')::integer END FROM touched"
    )


def channel(ns: int) -> str:
    return f"omnirelay_{ns}"


class PostgresBell:
    """One listening connection for all sleepers of this process, tended by a thread that starts when needed."""

    def __init__(self, store: PostgresStore, ns: int) -> None:
        self._store = store
        self._channel = channel(ns)
        self._changed = threading.Condition()
        self._rung = 0
        self._listening = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def listen(self) -> int:
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._tend, name=f"{self._channel}-bell", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._listening or self._closed, self._store.config.store_timeout)
            return self._rung

    def wait(self, mark: int, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._rung != mark or self._closed, seconds)

    def close(self) -> None:
        self._closed = True
        self._ring(listening=False)

    def _ring(self, listening: bool) -> None:
        with self._changed:
            self._listening = listening
            self._rung += 1
            self._changed.notify_all()

    def _tend(self) -> None:
        while not self._closed:
            try:
                self._hear()
            except (psycopg.Error, sa.exc.DBAPIError):
                self._ring(listening=False)  # sleepers look for themselves, and learn from it what is wrong
                threading.Event().wait(0.2)

    def _hear(self) -> None:
        """Listen until closed. A connection of its own: one that waits must not be handed out by the pool."""
        arguments, settings = self._store.engine.dialect.create_connect_args(self._store.engine.url)
        with psycopg.connect(*arguments, **settings, autocommit=True) as connection:
            connection.execute(f"LISTEN {self._channel}")
            self._ring(listening=True)
            while not self._closed:
                for _ in connection.notifies(timeout=1.0, stop_after=1):
                    self._ring(listening=True)


def translated(error: psycopg.Error) -> LeaseError:
    """The driver's error as one of ours, with what to do about it."""
    match error:
        case psycopg.errors.LockNotAvailable():
            return StoreBusy(
                f"another transaction held the queue for too long ({error}). Nothing was written; repeat the call"
            )
        case psycopg.errors.DiskFull() | psycopg.errors.OutOfMemory():
            return StoreFull(f"no space is left in the database ({error}). Nothing was written; free space and repeat")
        case psycopg.errors.ReadOnlySqlTransaction() | psycopg.errors.InsufficientPrivilege():
            return StoreReadOnly(
                f"the database cannot be written ({error}): connect to the primary, with a user who may"
            )
        case psycopg.OperationalError():
            return StoreUnavailable(f"the database cannot be used ({error})")
    return StoreError(f"the database refused a statement: {error}")
