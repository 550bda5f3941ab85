"""A queue at one moment, as a file: what a copy can start from instead of replaying all that led there.

One JSON value a line: what it is a snapshot of, then rows, many in a line, then how many lines there were and a SHA-256
over all before.
Without its last line, or with any byte changed, it is refused.
"""

from __future__ import annotations

import base64
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from lease_core.deterministic import sql_state
from lease_core.errors import InvalidInput
from lease_core.model import Value
from lease_core.queue import LeaseQueue
from lease_core.recovery import carrying
from lease_core.replication.durable_file import force_folder
from lease_core.replication.errors import CorruptCopy
from lease_core.store import schema
from lease_core.store.base import HEAD_COLUMNS, Head, Store

FORMAT = 2
"""Since 2 there are readers and outcomes of effects in it, too."""
_TABLES = {
    "item": schema.item, "span": schema.span, "error": schema.error, "origin": schema.origin, "reader": schema.reader,
    "effect": sql_state.values,
}  # fmt: skip
_AT_ONCE = 2_000
# counters that belong to the queue's state; identity, marks and waiters belong to the place
_KEPT = ("next_id", "number", "pending", "active", "dead", "completed", "backpressure", "next_due", "next_expiry")
_encode = msgspec.json.Encoder().encode


class Snapshot(Value, frozen=True):
    """The first line of a snapshot. ``sequence_number`` is the last event it accounts for."""

    format: int
    namespace: str
    queue_id: str
    sequence_number: int
    head: dict[str, Any]
    rules: dict[str, Any]


class _End(Value, frozen=True):
    lines: int
    sha256: str


def snapshot(queue: LeaseQueue, path: str | Path) -> Snapshot:
    """Write the queue as it stands to ``path``, all of it or nothing, while others go on using it.

    ``rebuild(source, url, snapshot=path)`` then needs only the events after it, so what came before may be pruned from
    the log, or from the copy.
    """
    path = Path(path)
    if not path.name or path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidInput("path", f"{path} cannot be a file: name one in a folder that exists")
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        made = _write(queue, fresh)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    force_folder(path.absolute().parent)
    return made


def _write(queue: LeaseQueue, path: Path) -> Snapshot:
    with _one_moment(queue._store) as connection, path.open("xb") as file:
        head = _head(connection, queue._ns)
        made = Snapshot(
            FORMAT,
            queue.namespace,
            head.queue_id,
            head.number,
            {name: getattr(head, name) for name in _KEPT},
            {name: getattr(head, name) for name in ("exclusive", "high_mark", "low_mark", "capacity")},
        )
        digest, lines = hashlib.sha256(), 0
        for line in _lines(connection, queue._ns, made):
            digest.update(line)
            file.write(line)
            lines += 1
        file.write(_End(lines, digest.hexdigest()).to_json() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return made


@contextmanager
def _one_moment(store: Store) -> Iterator[sa.Connection]:
    """A connection that sees the database as it is now, whatever others write meanwhile."""
    store.check_usable()
    sqlite = store.engine.dialect.name == "sqlite"
    with store.guard, store.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN" if sqlite else "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            yield connection
        finally:
            connection.exec_driver_sql("ROLLBACK")


def _head(connection: sa.Connection, ns: int) -> Head:
    sql = sa.text(f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE ns = :ns")
    return Head(*connection.execute(sql, {"ns": ns}).one())


def _lines(connection: sa.Connection, ns: int, first: Snapshot) -> Iterator[bytes]:
    yield first.to_json() + b"\n"
    for name, table in _TABLES.items():
        if name == "effect":
            if not sa.inspect(connection).has_table(table.name):
                continue
            wanted: sa.Select[Any] = carrying.recorded_by(first.queue_id)
        else:
            wanted = sa.select(*_columns(name)).where(table.c.ns == ns)
        found = connection.execute(wanted, execution_options={"yield_per": _AT_ONCE})
        for rows in found.partitions(_AT_ONCE):
            yield _encode([name, [tuple(row) for row in rows]]) + b"\n"


def read_header(path: str | Path) -> Snapshot:
    """What the file is a snapshot of. The whole file is read and checked before anything is made of it."""
    _check(Path(path))
    with Path(path).open("rb") as file:
        line = file.readline()
    try:
        header = msgspec.json.decode(line, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise CorruptCopy(str(path), f"is not a snapshot ({error})", 0) from None
    if header.format > FORMAT:
        raise CorruptCopy(str(path), f"has format {header.format}; this version reads up to {FORMAT}", 0)
    return header


def load(path: str | Path, store: Store, ns: int) -> int:
    """Fill an empty, sealed copy from a snapshot, all of it or nothing. Gives the number that it stands at."""
    header = read_header(path)
    with store.guard, store.engine.connect() as connection:
        begin = "BEGIN IMMEDIATE" if connection.dialect.name == "sqlite" else "BEGIN"
        store.patiently(lambda: connection.exec_driver_sql(begin))
        try:
            values = dict(header.head) | {"pruned": header.sequence_number}
            taken = connection.execute(
                sa.update(schema.head)
                .where(schema.head.c.ns == ns, schema.head.c.number == 0, schema.head.c.epoch < 0)
                .values(values)
            )
            if taken.rowcount == 1:
                for name, rows in batches(Path(path)):
                    _fill(connection, ns, name, rows)
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
    return header.sequence_number


def _fill(connection: sa.Connection, ns: int, name: str, rows: list[list[Any]]) -> None:
    if name == "effect":
        sql_state.make_tables(connection)
        connection.exec_driver_sql(carrying.insert_effects(connection.dialect.name), [tuple(row) for row in rows])
    else:
        connection.exec_driver_sql(_insert(name, connection.dialect.name), [(ns, *row) for row in rows])


def _insert(name: str, dialect: str) -> str:
    """The plain statement: going through SQLAlchemy's own takes longer than the database does."""
    columns = ["ns", *(column.name for column in _columns(name))]
    marks = ", ".join(["?" if dialect == "sqlite" else "%s"] * len(columns))
    return f"INSERT INTO {_TABLES[name].name} ({', '.join(columns)}) VALUES ({marks})"


def _columns(name: str) -> list[sa.Column[Any]]:
    return [column for column in _TABLES[name].c if column.name != "ns"]


def _check(path: Path) -> None:
    digest, lines, last = hashlib.sha256(), 0, b""
    if not path.is_file():
        raise InvalidInput("snapshot", f"there is no file {path}")
    with path.open("rb") as file:
        for line in file:
            if last:
                digest.update(last)
                lines += 1
            last = line
    try:
        end = msgspec.json.decode(last, type=_End)
    except msgspec.MsgspecError:
        raise CorruptCopy(str(path), "the snapshot is cut off: its last line is missing", 0) from None
    if (end.lines, end.sha256) != (lines, digest.hexdigest()) or end.to_json() + b"\n" != last:
        raise CorruptCopy(str(path), "the snapshot is damaged: its checksum does not fit", 0)


def batches(path: Path) -> Iterator[tuple[str, list[list[Any]]]]:
    with path.open("rb") as file:
        next(file)
        for line in file:
            value = msgspec.json.decode(line)
            if not isinstance(value, list):
                return
            name, rows = value
            for at, column in enumerate(_columns(name)):
                if isinstance(column.type, sa.LargeBinary):
                    for row in rows:
                        row[at] = None if row[at] is None else base64.b64decode(row[at])
            yield name, rows
