"""The hub's tables: batches as they came, how far each source is, the merged order's head, and readers' cursors."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from lease_core import sqlite_file
from lease_core.errors import InvalidInput
from lease_core.replication.sinks.sql import no_room, open_engine

metadata = sa.MetaData()
_number = sa.BigInteger().with_variant(sa.Integer, "sqlite")

streams = sa.Table(
    "omnirelay_hub_stream",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("source", sa.String(255), nullable=False),
    sa.Column("namespace", sa.String(1024), nullable=False),
    sa.Column("first", _number, nullable=False),
    sa.Column("last", _number, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.UniqueConstraint("source", "namespace"),
)
batches = sa.Table(
    "omnirelay_hub_batch",
    metadata,
    sa.Column("upto", _number, primary_key=True, autoincrement=False),  # the merged position of its last event
    sa.Column("stream", sa.Integer, sa.ForeignKey(streams.c.id), nullable=False),
    sa.Column("first", _number, nullable=False),
    sa.Column("last", _number, nullable=False),
    sa.Column("previous", sa.String(64), nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("size", sa.Integer, nullable=False),  # of the lines; they may be stored in less
    sa.Column("packing", sa.SmallInteger, nullable=False),
    sa.Column("lines", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("stream", "last"),
    sa.Index("omnirelay_hub_batch_by_stream", "stream", "upto"),
)
heads = sa.Table(
    "omnirelay_hub_head",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("position", _number, nullable=False),
)
cursors = sa.Table(
    "omnirelay_hub_cursor",
    metadata,
    sa.Column("owner", sa.String(255), primary_key=True),
    sa.Column("reader", sa.String(255), primary_key=True),
    sa.Column("position", _number, nullable=False),
)


@sa.event.listens_for(batches, "after_create")
def _store_as_it_is(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    """Compressing what is large is PostgreSQL's default, and costs more than the disk does."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text(f"ALTER TABLE {table.name} ALTER COLUMN lines SET STORAGE EXTERNAL"))


def open_database(url: str | sa.URL) -> sa.Engine:
    """An engine on a database that keeps what was committed, whatever its settings are."""
    engine = open_engine(url)
    match engine.dialect.name:
        case "sqlite":
            if engine.url.database in (None, "", ":memory:"):
                raise InvalidInput("url", "the hub must keep what it acknowledges: name a file, sqlite:///hub.db")
            if folder := sqlite_file.missing_folder(engine.url):
                raise InvalidInput("url", f"the directory {folder} does not exist; create it, or change the path")
            sa.event.listen(engine, "connect", _prepare_sqlite)
            sa.event.listen(engine, "begin", _begin_sqlite)
        case "postgresql":
            sa.event.listen(engine, "connect", _prepare_postgres)
        case other:
            raise InvalidInput("url", f"{other} is not supported; use sqlite:///path or postgresql://user@host/db")
    return engine


def why(error: Exception) -> str:
    """What is wrong with the database. Its own words may have its address in them, and so do not go out."""
    if no_room(error):
        return "no space is left for its database: free some; nothing that was acknowledged is lost"
    return type(error).__name__


def make_tables(engine: sa.Engine) -> None:
    """Make what is missing. Two hubs may do so at the same time, so the loser looks again."""
    try:
        metadata.create_all(engine)
    except sa.exc.DBAPIError:
        metadata.create_all(engine)
    with engine.connect() as connection:
        if connection.scalar(sa.select(heads.c.position)) is not None:
            return
    try:
        with engine.begin() as connection:
            connection.execute(sa.insert(heads).values(id=1, position=0))
    except sa.exc.IntegrityError:
        return


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says, not where the driver guesses
    for setting in (
        "page_size = 65536",  # batches are large; of a new file only
        "busy_timeout = 30000",
        "journal_mode = WAL",
        "synchronous = FULL",
        "cache_size = -16384",
    ):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("omnirelay_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _prepare_postgres(connection: Any, _: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SHOW synchronous_commit")
        if cursor.fetchone()[0] == "off":  # an acknowledged batch must survive a crash
            cursor.execute("SET synchronous_commit = on")
    connection.commit()
