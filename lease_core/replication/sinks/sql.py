"""Events in another SQL database, with the position in the same transaction."""

from __future__ import annotations

import sqlite3
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.codec import decode_event
from lease_core.replication.durable_file import no_room_left
from lease_core.replication.errors import CorruptCopy, HistoryDiffers, SinkUnavailable, UnreadableEvent
from lease_core.replication.paged import Paged
from lease_core.replication.same_event import check_last

_metadata = sa.MetaData()
_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")

copied_events = sa.Table(
    "omnirelay_copied_event",
    _metadata,
    sa.Column("source", sa.String(255), primary_key=True),
    sa.Column("namespace", sa.String(1024), primary_key=True),
    sa.Column("sequence_number", _number, primary_key=True, autoincrement=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("crc32", _number, nullable=False),
)
copy_positions = sa.Table(
    "omnirelay_copy_position",
    _metadata,
    sa.Column("source", sa.String(255), primary_key=True),
    sa.Column("namespace", sa.String(1024), primary_key=True),
    sa.Column("last", _number, nullable=False),
)


class _Moved(SinkUnavailable):
    """The copy does not end where it did."""


class SqlSink:
    """Writes each event as a row of ``omnirelay_copied_event``: its number, its JSON and a checksum.

    Rows and position commit together and the numbers are the key, so an event is there once, whoever writes. ``source``
    keeps queues of the same namespace apart. The tables are made when they are missing.
    """

    compares = True

    def __init__(self, url: str | sa.URL, name: str = "sql", *, source: str = "") -> None:
        self.name = name
        self._source = source
        self._engine = open_engine(url)
        self._ready = False
        self._lock = threading.Lock()
        self._insert = insert_statement(self._engine, copied_events)
        self._move_on = _move_statement(self._engine)
        self._ends: dict[str, int] = {}  # where copies ended when last they were written to

    def deliver(self, batch: Batch) -> None:
        with self._lock, _room():
            end = self._ends.pop(batch.namespace, None)
            try:
                self._ends[batch.namespace] = self._append(batch, end)
            except _Moved:
                if end is None:
                    raise
                self._ends[batch.namespace] = self._append(batch, None)

    def _append(self, batch: Batch, position: int | None) -> int:
        """Write what is not there yet, and give where the copy ends then. ``position`` is where, if that is known."""
        with self._begin() as connection:
            if position != batch.first - 1:
                position = self._position(connection, batch.namespace)
            check_last(batch, position or 0, lambda number: self._event(connection, batch.namespace, number))
            rest = batch.after(position or 0)
            if rest is None:
                return position or 0
            if position and rest.first != position + 1:
                raise HistoryDiffers(f"the copy ends at event {position}, and {rest.first} does not follow it")
            self._move(connection, rest.namespace, position, rest.last)
            rows = [
                (self._source, rest.namespace, number, line, zlib.crc32(line.encode()))
                for number, line in zip(rest.numbers, rest.lines, strict=True)
            ]
            connection.exec_driver_sql(self._insert, rows)
        return rest.last

    def position(self, namespace: str) -> int | None:
        with self._lock, _room(), self._begin() as connection:
            return self._position(connection, namespace) or 0

    def close(self) -> None:
        self._engine.dispose()

    def _begin(self) -> Any:
        if not self._ready:
            try:
                _metadata.create_all(self._engine)
            except sa.exc.DBAPIError:  # another relay made them at the same moment
                _metadata.create_all(self._engine)
            self._ready = True
        return self._engine.begin()

    def _position(self, connection: sa.Connection, namespace: str) -> int | None:
        found = connection.execute(
            sa.select(copy_positions.c.last).where(*_of(copy_positions, self._source, namespace))
        ).scalar()
        return None if found is None else int(found)

    def _event(self, connection: sa.Connection, namespace: str, number: int) -> LeaseEvent | None:
        found = connection.execute(
            sa.select(copied_events.c.event).where(
                *_of(copied_events, self._source, namespace), copied_events.c.sequence_number == number
            )
        ).scalar()
        return None if found is None else decode_event(found)

    def _move(self, connection: sa.Connection, namespace: str, old: int | None, new: int) -> None:
        """Move the position, unless another relay did: the whole delivery is then rolled back."""
        if old is None:
            connection.execute(copy_positions.insert().values(source=self._source, namespace=namespace, last=new))
        elif connection.exec_driver_sql(self._move_on, (new, self._source, namespace, old)).rowcount != 1:
            raise _Moved("another relay is writing to the same copy")


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        if not no_room(error):
            raise
        raise SinkUnavailable(no_room_left("for the copy's database")) from None


def no_room(error: BaseException) -> bool:
    """Whether a database says that its disk is full."""
    cause = getattr(error, "orig", None)
    code = getattr(cause, "sqlite_errorcode", 0)
    full = code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE
    return full or getattr(cause, "sqlstate", None) == "53100"


def open_engine(url: str | sa.URL) -> sa.Engine:
    """An engine on ``url``; plain ``postgresql://`` means psycopg, as for the queue."""
    try:
        parsed = sa.make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        return sa.create_engine(parsed, pool_pre_ping=True, hide_parameters=True)
    except (sa.exc.ArgumentError, ValueError):
        raise InvalidInput("url", "is not a database URL that SQLAlchemy can use") from None
    except ImportError as error:
        raise InvalidInput(
            "url", f"its driver is missing ({error}); for PostgreSQL: pip install 'omnirelay-dagster[postgres]'"
        ) from error


def insert_statement(engine: sa.Engine, table: sa.Table) -> str:
    """The insert as the driver takes it, with a place for each value by position."""
    names = ", ".join(column.name for column in table.columns)
    return f"INSERT INTO {table.name} ({names}) VALUES ({', '.join(_places(engine, len(table.columns)))})"


def _move_statement(engine: sa.Engine) -> str:
    new, source, namespace, old = _places(engine, 4)
    return (
        f"UPDATE {copy_positions.name} SET last = {new} "
        f"WHERE source = {source} AND namespace = {namespace} AND last = {old}"
    )


def _places(engine: sa.Engine, count: int) -> list[str]:
    """How a driver has places for values written, by position."""
    match engine.dialect.paramstyle:
        case "format" | "pyformat":
            return ["%s"] * count
        case "qmark":
            return ["?"] * count
        case "numeric":
            return [f":{number}" for number in range(1, count + 1)]
        case _:
            return [f"${number}" for number in range(1, count + 1)]


def _of(table: sa.Table, source: str, namespace: str) -> tuple[sa.ColumnElement[bool], ...]:
    return table.c.source == source, table.c.namespace == namespace


def read_sql(url: str | sa.URL, namespace: str, *, source: str = "") -> SqlCopy:
    """The copy of ``namespace`` that a ``SqlSink`` keeps in the database at ``url``."""
    return SqlCopy(open_engine(url), namespace, source)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except sa.exc.DBAPIError as error:
        said = str(error.orig).partition("\n")[0]
        raise StoreUnavailable(f"the copy's database cannot be read ({type(error.orig).__name__}: {said})") from error


class SqlCopy:
    """A source that reads the rows of one namespace, checks each against its checksum, and that none is missing."""

    def __init__(self, engine: sa.Engine, namespace: str, source: str) -> None:
        self.namespace = namespace
        self._engine, self._source = engine, source
        self.events = Paged(self.read).events

    def read(self, after: int = 0, page: int = 1_000) -> Iterator[LeaseEvent]:
        """The events above ``after``. Raises ``CorruptCopy`` at the first that is damaged, after all before it."""
        first = True
        while rows := self._rows(after, page) or self._late(after, page):
            for number, text, crc in rows:
                if number != after + 1 and not (first and after == 0):  # a copy may begin late, not leave out
                    raise CorruptCopy(copied_events.name, f"events {after + 1} to {number - 1} are missing", after)
                yield self._event(number, text, crc, after)
                after, first = number, False

    def _late(self, after: int, page: int) -> list[tuple[int, str, int]]:
        """What was committed since a look found nothing above ``after``; there must be some if the position says so."""
        if (last := self.last()) is None or last <= after:
            return []
        if rows := self._rows(after, page):
            return rows
        raise CorruptCopy(copied_events.name, f"events {after + 1} to {last} are missing", after)

    def _event(self, number: int, text: str, crc: int, last_good: int) -> LeaseEvent:
        line = text.encode()
        try:
            event = decode_event(line)
        except UnreadableEvent as error:
            raise CorruptCopy(copied_events.name, str(error), last_good) from None
        if zlib.crc32(line) != crc or event.sequence_number != number or event.namespace != self.namespace:
            raise CorruptCopy(copied_events.name, f"row {number} is not the event that was written", last_good)
        return event

    def _rows(self, after: int, limit: int) -> list[tuple[int, str, int]]:
        columns = copied_events.c
        with _reading(), self._engine.connect() as connection:
            found = connection.execute(
                sa.select(columns.sequence_number, columns.event, columns.crc32)
                .where(*_of(copied_events, self._source, self.namespace), columns.sequence_number > after)
                .order_by(columns.sequence_number)
                .limit(limit)
            )
            return [(int(number), text, int(crc)) for number, text, crc in found]

    def last(self) -> int | None:
        """The number of the last event, by the position that is kept with the rows; none if there is none."""
        with _reading(), self._engine.connect() as connection:
            return connection.execute(
                sa.select(copy_positions.c.last).where(*_of(copy_positions, self._source, self.namespace))
            ).scalar()
