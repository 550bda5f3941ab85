"""Bringing a database's schema to the version this code knows, and refusing any other."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from lease_core.errors import SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from lease_core.store import schema
from lease_core.store.base import Store

_REMEDY = "run LeaseQueue.migrate(url), or open with auto_migrate=True"
_LOCK = 7_166_359_214  # any number: who migrates holds it, so that two never do
_made_before: dict[str, list[str]] = {}  # how this process made a SQLite schema: the next one comes much sooner


def ensure(store: Store, auto: bool) -> None:
    """Check the schema; make or migrate it if ``auto``. Raises what is wrong and what to do otherwise."""
    revision = _revision(store)
    if revision == schema.REVISION:
        return
    if revision is not None and revision > schema.REVISION:
        raise SchemaTooNew(
            f"the database has schema {revision}, this version of the code knows {schema.REVISION}: "
            "upgrade omnirelay-dagster here, or use the version that migrated the database"
        )
    if not auto and revision is None:
        raise SchemaMissing(f"the database holds no queue yet: {_REMEDY}")
    if not auto:
        raise SchemaOutdated(f"the database has schema {revision}, this code needs {schema.REVISION}: {_REMEDY}")
    try:
        _upgrade(store)
    except sa.exc.DBAPIError as error:
        raise store.translated(error) from error


def _revision(store: Store) -> str | None:
    def read() -> str | None:
        with store.engine.connect() as connection:
            return _read_revision(connection)

    try:
        return store.patiently(read)
    except sa.exc.DBAPIError as error:
        raise store.translated(error) from error


def _read_revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table(schema.VERSION_TABLE):
        return None
    found = connection.exec_driver_sql(f"SELECT version_num FROM {schema.VERSION_TABLE}").scalar()
    return None if found is None else str(found)


def _upgrade(store: Store) -> None:
    """Run the migrations in one transaction, one process at a time."""
    engine = store.engine
    lock = "BEGIN EXCLUSIVE" if engine.dialect.name == "sqlite" else f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK})"
    with engine.connect() as connection:
        store.patiently(lambda: connection.exec_driver_sql(lock))
        try:
            if _read_revision(connection) is None and sa.inspect(connection).has_table(schema.head.name):
                raise SchemaError(
                    f"the database has a queue's tables but no {schema.VERSION_TABLE} to say which version they are: "
                    "restore the whole backup, or drop the omnirelay_ tables to start anew"
                )
            if engine.dialect.name == "sqlite" and _is_empty(connection):
                _make_sqlite(connection)
            else:
                _run_migrations(connection)
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise


def _run_migrations(connection: sa.Connection) -> None:
    from alembic import command  # takes a while to import, and is seldom needed
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise SchemaError(f"no migration leads from the database's schema to {schema.REVISION}: {error}") from error


def _is_empty(connection: sa.Connection) -> bool:
    return connection.exec_driver_sql("SELECT 1 FROM sqlite_master").first() is None


def _make_sqlite(connection: sa.Connection) -> None:
    """The migrations on an empty database; after the first in this process, what they led to is made directly."""
    if schema.REVISION not in _made_before:
        _run_migrations(connection)
        made = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        stamp = f"INSERT INTO {schema.VERSION_TABLE} (version_num) VALUES ('{schema.REVISION}')"
        _made_before[schema.REVISION] = [*made.scalars(), stamp]
        return
    for statement in _made_before[schema.REVISION]:
        connection.exec_driver_sql(statement)
