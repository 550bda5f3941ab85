"""PostgreSQL, for many machines. Time is the server's; writers of a namespace take turns.

An operation is two round trips: one that begins, takes the lock and reads, one that writes and commits. Every statement
after the lock takes its own snapshot (READ COMMITTED), so it sees all that was committed before the lock was had.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import pq
from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
from sqlalchemy.pool import ConnectionPoolEntry

from lease_core.config import QueueConfig
from lease_core.errors import (
    InvalidInput,
    LeaseError,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
)
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
    Write,
)
from lease_core.store.wire import Statement, Wire

_CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
# Writers of a namespace queue up for an advisory lock: with many of them it changes hands faster than a lock on the
# head row, which each would have to look up again. What is read after it is as the last holder left it.
_LOCK = "SELECT pg_advisory_xact_lock(7166359, ?::integer)"
_HEAD = f"SELECT {HEAD_COLUMNS}, {_CLOCK} FROM omnirelay_head WHERE ns = ?"
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NOW = f"SELECT {_CLOCK}"
_INSERT_LOG = "INSERT INTO omnirelay_log (ns, last, first, at, nonce, document) VALUES (?, ?, ?, ?, ?, ?)"
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
_SESSION_ENDED = psycopg.errors.IdleInTransactionSessionTimeout
_TOGETHER = 12
_EXPECTATION_FAILED = "22P02"

# The planner has no statistics for a young table and keeps plans made for an empty one; every statement here is
# written for an index, so anything else is never right.
_SETTINGS = """
    SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_bitmapscan = off;
    SET jit = off; SET plan_cache_mode = force_generic_plan; SET client_encoding = 'UTF8';
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
        patience = self.config.store_timeout
        noticing = {  # a server that vanished without a word is noticed about as soon
            "connect_timeout": max(2, round(patience)),
            "tcp_user_timeout": round(patience * 1000),
            "keepalives_idle": max(1, round(patience / 3)),
            "keepalives_interval": max(1, round(patience / 6)),
            "keepalives_count": 3,
        }
        engine = sa.create_engine(
            self.url.set(drivername="postgresql+psycopg"),
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,  # a transaction ends itself, or its connection leaves the pool
            pool_size=8,
            max_overflow=-1,
            connect_args={name: value for name, value in noticing.items() if name not in self.url.query},
        )
        sa.event.listen(engine, "connect", self._prepare)
        sa.event.listen(engine, "checkin", _end_unfinished)
        return engine

    def _prepare(self, connection: psycopg.Connection[Row], _entry: ConnectionPoolEntry) -> None:
        for dumper in (Int8Dumper, Int8BinaryDumper):  # all numbers travel as bigint, alone or in lists
            connection.adapters.register_dumper(int, dumper)
        before = connection.autocommit
        connection.autocommit = True
        durable = "on" if self.config.durability == "full" else "off"
        patience = round(self.config.store_timeout * 1000)
        connection.execute(f"{_SETTINGS}; SET synchronous_commit = {durable}; SET lock_timeout = {patience}")
        connection.autocommit = before

    def numbered(self, sql: str) -> str:
        """The statement with PostgreSQL's own marks: $1, $2 and so on."""
        form = self._forms.get(sql)
        if form is None:
            first, *rest = sql.split("?")
            form = self._forms[sql] = first + "".join(f"${at}{part}" for at, part in enumerate(rest, 1))
        return form

    def wire(self, pooled: Any) -> Wire:
        """What statements run through on this connection; it lives as long as the connection does."""
        wire: Wire | None = pooled.info.get("wire")
        if wire is None:
            wire = pooled.info["wire"] = Wire(pooled.driver_connection)
        return wire

    def translated(self, error: Exception) -> LeaseError:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        return translated(cause) if isinstance(cause, psycopg.Error) else StoreError(str(cause))

    def pack(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def connect(self) -> Any:
        try:
            return self.take()
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
        wire = self.wire(pooled)
        statements = [(self.numbered(sql), params) for sql, params in queries]
        try:
            if len(statements) == 1:
                return wire.exchange(statements)
            return wire.exchange([(_SNAPSHOT, ()), *statements, ("COMMIT", ())])[1:-1]
        except psycopg.Error as error:
            raise self.failure(pooled, error) from error
        finally:
            self.done_with(pooled)

    def done_with(self, pooled: Any) -> None:
        """Give a connection back, or throw it away if an exchange or a transaction on it was broken off."""
        if self.wire(pooled).busy or _is_in_transaction(pooled.driver_connection):
            pooled.invalidate()
            pooled.close()
        else:
            self.put_back(pooled)

    def failure(self, pooled: Any, error: psycopg.Error) -> Exception:
        """What to raise for the driver's error. A connection that is of no use any more leaves the pool."""
        connection = pooled.driver_connection
        gone = psycopg.errors.AdminShutdown | psycopg.errors.CrashShutdown | psycopg.errors.CannotConnectNow
        if connection.closed or self.wire(pooled).busy or isinstance(error, gone | _SESSION_ENDED):
            self.wire(pooled).busy = True
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
            for bell in list(self._bells.values()):  # a copy, for other threads may come to wait
                bell.close()
        super().close()


class PostgresTransaction(Transaction):
    def __init__(self, store: PostgresStore, ns: int) -> None:
        super().__init__(ns)
        self.store = store
        self._notifies = False
        self._logged: tuple[int, int] | None = None
        self._pooled: Any = None
        self._wire: Wire
        self._open = False

    def __enter__(self) -> PostgresTransaction:
        return self

    def fetch(self, *queries: Query) -> list[list[Row]]:
        if self._open:
            return self._exchange(queries)
        [_, _, [[*columns, now]], *rows] = self._begin([(_LOCK, (self.ns,)), (_HEAD, (self.ns,)), *queries])
        self.head = Head(*columns)
        self.now = now if self.store.clock is None else self.store.read_now()
        self.store.reach("locked")
        return rows

    def _begin(self, statements: Sequence[Statement]) -> list[list[Row]]:
        self._pooled = self.store.connect()
        self._wire = self.store.wire(self._pooled)
        self._open = True
        return self._exchange([(_BEGIN, ()), *statements])

    def _exchange(self, statements: Sequence[Statement]) -> list[list[Row]]:
        form = self.store.numbered
        try:
            return self._wire.exchange([(form(sql), params) for sql, params in statements])
        except psycopg.Error as error:
            raise self._failed(error) from error

    def log(self, first: int, last: int, document: bytes, at: int) -> None:
        nonce = secrets.randbits(62)
        self._logged = (last, nonce)
        self.write(_INSERT_LOG, (self.ns, last, first, at, nonce, document))

    def notify(self) -> None:
        self._notifies = True

    def gathered(self) -> list[Statement]:
        """Everything to be written, in as few statements as possible."""
        together = [write for write in self.writes if not write.last]
        if self.items:
            together.append(_item_insert(self.ns, self.items))
        statements = [_as_one(together[at : at + _TOGETHER]) for at in range(0, len(together), _TOGETHER)]
        statements += [(sql, params) for sql, params, _, last in self.writes if last]
        if self._notifies:
            statements.append(("SELECT pg_notify(?, '')", (channel(self.ns),)))
        return statements

    def commit(self) -> None:
        if not (self.writes or self.items):
            return
        statements = self.gathered()
        if self.store.probe is not None:
            statements = self._step_by_step(statements)
        try:
            self._exchange([*statements, ("COMMIT", ())])
        except ConnectionLost as lost:
            if self._logged is None:
                raise
            raise CommitInDoubt(*self._logged) from lost.__cause__
        self._open = False
        self.store.reach("after-commit")

    def _step_by_step(self, statements: list[Statement]) -> list[Statement]:
        """Write without committing, with a point to crash at in the middle. Nothing is left to be sent."""
        for at, statement in enumerate(statements):
            if at == len(statements) // 2:
                self.store.reach("half-written")
            self._exchange([statement])
        self.store.reach("before-commit")
        return []

    def _failed(self, error: psycopg.Error) -> Exception:
        if error.sqlstate == _EXPECTATION_FAILED:
            return SpanMoved(str(error))
        if isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure):
            return ConnectionLost()  # nothing happened and running again is right, as after a lost connection
        return self.store.failure(self._pooled, error)

    def __exit__(self, *_: object) -> None:
        if self._pooled is None or self._pooled.driver_connection is None:
            return
        try:
            if self._open and not self._wire.busy:
                self._wire.exchange([("ROLLBACK", ())])
        except psycopg.Error:
            self._wire.busy = True  # of no use any more; the server rolls back when it goes
        finally:  # also where this is interrupted
            self.store.done_with(self._pooled)


class JoinedPostgresTransaction(PostgresTransaction):
    """Writes inside of the caller's transaction; the caller commits or rolls back."""

    def __init__(self, store: PostgresStore, ns: int, connection: Any) -> None:
        super().__init__(store, ns)
        self._given = connection

    def _begin(self, statements: Sequence[Statement]) -> list[list[Row]]:
        self._open = True
        if not isinstance(self._given, psycopg.Connection):
            raise InvalidInput(
                "connection", f"must be a SQLAlchemy or psycopg connection, not {type(self._given).__name__}"
            )
        if self._given.info.transaction_status == pq.TransactionStatus.IDLE and self._given.autocommit:
            raise InvalidInput("connection", "is in autocommit mode; begin a transaction on it first")
        return [[], *self._exchange(statements)]

    def _exchange(self, statements: Sequence[Statement]) -> list[list[Row]]:
        try:
            return [self._run(sql, params) for sql, params in statements]
        except psycopg.Error as error:
            raise translated(error) from error

    def _run(self, sql: str, params: Sequence[Any]) -> list[Row]:
        with self._given.cursor(row_factory=psycopg.rows.tuple_row) as cursor:
            cursor.execute(sql.replace("?", "%s"), params)
            return [] if cursor.description is None else cursor.fetchall()

    def commit(self) -> None:
        self._exchange(self.gathered())

    def __exit__(self, *_: object) -> None:
        pass


def _end_unfinished(connection: psycopg.Connection[Row] | None, entry: ConnectionPoolEntry) -> None:
    """Close a connection that comes to the pool with its transaction open, and with it the queue's lock.

    Whoever had it was interrupted at the very moment of giving it back.
    """
    if connection is not None and _is_in_transaction(connection):
        entry.invalidate()


def _is_in_transaction(connection: psycopg.Connection[Row]) -> bool:
    return connection.pgconn.transaction_status != pq.TransactionStatus.IDLE


def _as_one(writes: Sequence[Write]) -> Statement:
    """One statement that does all of the writes."""
    sql = _combined(tuple((write.sql, write.expect) for write in writes))
    return sql, [value for write in writes for value in write.params]


@lru_cache(maxsize=1024)
def _combined(writes: tuple[tuple[str, int | None], ...]) -> str:
    """The statement's text. It fails by itself if a part does not touch as many rows as it should."""
    parts = [f"w{i} AS ({sql} RETURNING 1)" for i, (sql, _) in enumerate(writes)]
    counts = [
        f"WHEN (SELECT count(*) FROM w{i}) <> {int(expect)} "
        f"THEN ((SELECT count(*) FROM w{i}) || ' rows touched, not {int(expect)}')::integer"
        for i, (_, expect) in enumerate(writes)
        if expect is not None
    ]
    outcome = f"CASE {' '.join(counts)} ELSE 1 END" if counts else "1"
    return f"WITH {', '.join(parts)} SELECT {outcome}"


def _item_insert(ns: int, rows: list[Row]) -> Write:
    """One statement for all rows. A column that is the same in every row travels once."""
    columns = list(zip(*rows, strict=True))
    varying = tuple(at == 0 or values.count(values[0]) < len(values) for at, values in enumerate(columns))
    once = [values[0] for values, varies in zip(columns, varying, strict=True) if not varies]
    arrays = [list(values) for values, varies in zip(columns, varying, strict=True) if varies]
    return Write(_item_insert_sql(varying), [ns, *once, *arrays])


@lru_cache(maxsize=256)
def _item_insert_sql(varying: tuple[bool, ...]) -> str:
    several = [(name, kind) for (name, kind), varies in zip(_ITEM_COLUMNS, varying, strict=True) if varies]
    chosen = [
        f"u.{name}" if varies else f"?::{kind}" for (name, kind), varies in zip(_ITEM_COLUMNS, varying, strict=True)
    ]
    return (
        f"INSERT INTO omnirelay_item (ns, {', '.join(name for name, _ in _ITEM_COLUMNS)}) "
        f"SELECT ?::integer, {', '.join(chosen)} FROM unnest({', '.join(f'?::{kind}[]' for _, kind in several)}) "
        f"AS u({', '.join(name for name, _ in several)})"
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
