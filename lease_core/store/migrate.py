"""Bringing a database's schema to the version this code knows, and refusing any other."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from lease_core.errors import SchemaMissing, SchemaOutdated, SchemaTooNew, StoreUnavailable
from lease_core.store import schema
from lease_core.store.base import Store

_REMEDY = "run LeaseQueue.migrate(url), or open with auto_migrate=True"
_LOCK = 7_166_359_214  # any number: who migrates holds it, so that two never do


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
        _upgrade(store.engine)
    except sa.exc.DBAPIError as error:
        raise store.translated(error) from error


def _revision(store: Store) -> str | None:
    try:
        with store.engine.connect() as connection:
            if not sa.inspect(connection).has_table(schema.VERSION_TABLE):
                return None
            found = connection.exec_driver_sql(f"SELECT version_num FROM {schema.VERSION_TABLE}").scalar()
            return None if found is None else str(found)
    except sa.exc.DBAPIError as error:
        raise StoreUnavailable(
            f"the database cannot be opened ({error.orig}): check the url and that it is running"
        ) from error


def _upgrade(engine: sa.Engine) -> None:
    """Run the migrations in one transaction, one process at a time."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    lock = "BEGIN EXCLUSIVE" if engine.dialect.name == "sqlite" else f"BEGIN; SELECT pg_advisory_xact_lock({_LOCK})"
    with engine.connect() as connection:
        connection.exec_driver_sql(lock)
        try:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
