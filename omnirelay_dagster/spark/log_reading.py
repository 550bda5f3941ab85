"""Reading the log's rows straight from the database, on whatever machine: Spark's planner and executors do.

Rows come through ADBC where its driver is installed, else through the plain driver. Nothing is written: the file is
opened read-only, the session on a server is read-only. Every row is checked to follow the one before, so a range that
was pruned meanwhile is an error, never a gap.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa

from lease_core.errors import EventsPruned, InvalidInput, StoreError, StoreUnavailable
from lease_core.store import parse, shown
from omnirelay_dagster.spark.log_columns import LogDocument

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_HEAD = "SELECT ns, number, pruned, queue_id FROM omnirelay_head WHERE namespace = ?"
# The inner query finds the row in which the range ends by its index: without it the last page would read to the log's
# end.
_PAGE = (
    "SELECT last, first, {document} FROM omnirelay_log WHERE ns = ? AND last > ? "
    "AND last <= (SELECT min(last) FROM omnirelay_log WHERE ns = ? AND last >= ?) ORDER BY last LIMIT ?"
)
_WITHIN = "CASE WHEN at >= ? AND at <= ? THEN document END AS document"
_FIRST_PAGE, _LARGEST_PAGE = 16, 1024
_PAGE_BYTES = 4 * 1024 * 1024
_READ_ONLY = (
    "SET default_transaction_read_only = on; SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off"
)


class RangePruned(EventsPruned):
    """Part of the range asked for is no longer in the log. ``oldest`` is the first number that is."""

    def __init__(self, after: int, oldest: int) -> None:
        super().__init__(after, oldest)
        self.args = (
            f"from_sequence: event {after + 1} was asked for, but the log was pruned and begins at {oldest}: read the "
            f"missing ones from a copy of the log (option archive), or set from_sequence to {oldest} (or to "
            "'earliest') to do without",
        )


class LogHead(NamedTuple):
    """Which queue it is, the number of its last event, and the number up to which its log was pruned."""

    ns: int
    number: int
    pruned: int
    queue_id: str


class Rows(Protocol):
    """A way to run a query. ``?`` marks are bound values."""

    def fetch(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]: ...

    def close(self) -> None: ...


class Log:
    """The log of one namespace. Open it with ``open_log``."""

    def __init__(self, rows: Rows, namespace: str) -> None:
        self._rows = rows
        self.namespace = namespace

    def head(self) -> LogHead:
        found = self._rows.fetch(_HEAD, (self.namespace,))
        if not found:
            raise InvalidInput("namespace", f"there is no queue {self.namespace!r} in this database")
        return LogHead(*found[0])

    def documents(
        self, ns: int, lowest: int, highest: int, since: int | None = None, until: int | None = None
    ) -> Iterator[LogDocument]:
        """The rows that hold the events ``lowest`` to ``highest``, a page at a time; pages grow while rows are small.

        With ``since`` or ``until`` (epoch microseconds) rows of another time come without their document.
        """
        after, page = lowest - 1, _FIRST_PAGE
        timed = since is not None or until is not None
        bounds = (since if since is not None else -(2**62), until if until is not None else 2**62) if timed else ()
        sql = _PAGE.format(document=_WITHIN if timed else "document")
        while after < highest:
            size = 0
            found = self._rows.fetch(sql, (*bounds, ns, after, ns, highest, page))
            for last, first, body in found:
                if first > after + 1:  # the log is dense: what is missing was pruned
                    raise RangePruned(after, first)
                yield LogDocument(first, last, body)
                size += 0 if body is None else len(body)
                after = last
            if len(found) < page:
                break
            page = min(page * 4, _LARGEST_PAGE) if size < _PAGE_BYTES else max(page // 2, 1)
        if after < highest:
            self._explain_end(after, highest)

    def _explain_end(self, after: int, highest: int) -> None:
        head = self.head()
        if after < head.pruned:
            raise RangePruned(after, head.pruned + 1)
        raise InvalidInput("to_sequence", f"is {highest}, but the log ends at {head.number}")


@contextmanager
def open_log(url: str, namespace: str, fetch: str = "auto") -> Iterator[Log]:
    """The log of ``namespace`` in the database that ``url`` names, for reading.

    ``fetch``: ``adbc``, ``driver`` (the plain one), or ``auto``: ADBC if it is installed.
    """
    resolved = resolve(url)
    where = shown(resolved)
    with _errors_of_drivers(where):
        rows = connect(resolved, fetch)
    with closing(rows), _errors_of_drivers(where):
        yield Log(rows, namespace)


def resolve(url: str) -> sa.URL:
    """The URL with ``${NAME}`` replaced from this process's environment: all of it, or in any of its parts."""
    if _VARIABLE.fullmatch(url):
        return parse(with_variables("url", url))
    parsed = parse(url)

    def expanded(text: str) -> str:
        return with_variables("url", text)

    parts = {name: getattr(parsed, name) for name in ("username", "password", "host", "database")}
    changed = {name: expanded(str(part)) for name, part in parts.items() if part is not None}
    query = {name: expanded(value) for name, value in parsed.query.items() if isinstance(value, str)}
    return parsed.set(**changed).update_query_dict(query)  # type: ignore[arg-type]


def absolute(url: str) -> str:
    """The URL with a relative path of a file made whole: other processes may look from elsewhere."""
    parsed = None if _VARIABLE.search(url) else parse(url)
    if parsed is None or not parsed.drivername.startswith("sqlite") or not parsed.database:
        return url
    if parsed.database.startswith((":", "file:")):
        return url
    whole = parsed.set(database=str(Path(parsed.database).absolute()))
    return whole.render_as_string(hide_password=False)


def with_variables(option: str, text: str) -> str:
    """The text with every ``${NAME}`` replaced from this process's environment."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1])
        if found is None:
            raise InvalidInput(
                option,
                f"the environment variable {match[1]} is not set here; set it on the driver and on every executor "
                f"(spark.executorEnv.{match[1]})",
            )
        return found

    return _VARIABLE.sub(value, text)


def connect(url: sa.URL, fetch: str = "auto") -> Rows:
    """A read-only connection to the database."""
    if fetch not in ("auto", "adbc", "driver"):
        raise InvalidInput("fetch", f"is {fetch!r}; use auto, adbc or driver")
    kind = "sqlite" if url.drivername.startswith("sqlite") else "postgresql"
    module = f"adbc_driver_{kind}"
    adbc = fetch != "driver" and importlib.util.find_spec(module) is not None
    if fetch == "adbc" and not adbc:
        raise InvalidInput("fetch", f"needs {module.replace('_', '-')}; install it, or use fetch=driver")
    if kind == "sqlite":
        return AdbcRows.sqlite(_readable(url)) if adbc else SqliteRows(_readable(url))
    return AdbcRows.postgresql(_plain(url)) if adbc else PostgresRows(_plain(url))


def _readable(url: sa.URL) -> str:
    """The file as a URI that opens it for reading and never creates it."""
    database = url.database
    if database in (None, "", ":memory:") or "mode=memory" in str(database):
        raise InvalidInput("url", "a database in memory cannot be read by other processes; use a file or PostgreSQL")
    path = Path(str(database).removeprefix("file:").partition("?")[0])
    if not path.is_file():
        where = "" if path.is_absolute() else f" (seen from {Path.cwd()}: give the whole path)"
        raise StoreUnavailable(f"url: there is no file {path}{where}")
    return f"{path.absolute().as_uri()}?mode=ro"


def _plain(url: sa.URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


def _numbered(sql: str) -> str:
    first, *rest = sql.split("?")
    return first + "".join(f"${at}{part}" for at, part in enumerate(rest, 1))


class AdbcRows:
    """Rows as Arrow has them; documents are handed on as views of its buffers."""

    def __init__(self, connection: Any, numbered: bool) -> None:
        self._connection = connection
        self._numbered = numbered

    @classmethod
    def sqlite(cls, uri: str) -> AdbcRows:
        from adbc_driver_sqlite import dbapi

        rows = cls(dbapi.connect(uri, autocommit=True), numbered=False)
        rows.fetch("PRAGMA busy_timeout = 30000", ())
        return rows

    @classmethod
    def postgresql(cls, uri: str) -> AdbcRows:
        from adbc_driver_postgresql import dbapi  # type: ignore[import-untyped,unused-ignore]

        rows = cls(dbapi.connect(uri, autocommit=True), numbered=True)
        with rows._connection.cursor() as cursor:
            for setting in _READ_ONLY.split(";"):
                cursor.execute(setting)
        return rows

    def fetch(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(_numbered(sql) if self._numbered else sql, list(params) or None)
            table = cursor.fetch_arrow_table()
        return list(zip(*(_values(column) for column in table.columns), strict=True))

    def close(self) -> None:
        self._connection.close()


def _values(column: Any) -> list[Any]:
    if "binary" in str(column.type):
        return [value.as_buffer() for value in column]
    values: list[Any] = column.to_pylist()
    return values


class SqliteRows:
    def __init__(self, uri: str) -> None:
        import sqlite3

        self._connection = sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)

    def fetch(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, params).fetchall()

    def close(self) -> None:
        self._connection.close()


class PostgresRows:
    def __init__(self, uri: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise StoreUnavailable(
                "url: PostgreSQL needs adbc-driver-postgresql or psycopg; pip install 'omnirelay-dagster[postgres]'"
            ) from error
        self._connection = psycopg.connect(uri, autocommit=True)
        self._connection.execute(_READ_ONLY)  # type: ignore[arg-type,unused-ignore]

    def fetch(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        cursor = self._connection.cursor(binary=True)
        return cursor.execute(sql.replace("?", "%s"), params).fetchall()  # type: ignore[arg-type,unused-ignore]

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _errors_of_drivers(where: str) -> Iterator[None]:
    """Turn what a driver raises into an error that names the database, without its password."""
    try:
        yield
    except Exception as error:
        kind = type(error).__module__.partition(".")[0]
        if kind not in ("sqlite3", "psycopg") and not kind.startswith("adbc_driver"):
            raise
        if "omnirelay_" in str(error) and re.search(r"no such table|does not exist", str(error)):
            raise StoreError(f"there is no queue in {where}: open it once with LeaseQueue, or check the url") from None
        raise StoreUnavailable(f"{where} could not be read: {error}") from None
