"""Databases: opening one by its URL, with the schema this code knows."""

from __future__ import annotations

import sqlalchemy as sa

from lease_core import database_url
from lease_core.config import QueueConfig
from lease_core.database_url import shown as shown
from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.store.base import Clock, Store

_POSTGRES = ("postgresql", "postgresql+psycopg", "postgres")


def parse(url: str | sa.URL) -> sa.URL:
    """The URL, if it names a database that can hold a queue."""
    parsed = database_url.parsed(url)
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite", *_POSTGRES):
        raise InvalidInput(
            "url", f"{parsed.drivername} is not supported; use sqlite:///path or postgresql://user@host/db"
        )
    return parsed


def open_store(url: str | sa.URL, config: QueueConfig, clock: Clock | None) -> Store:
    """A store on the database that ``url`` names. The schema is checked, or made, by ``lease_core.store.migrate``."""
    parsed = parse(url)
    if parsed.drivername in _POSTGRES:
        try:
            from lease_core.store.postgres import PostgresStore
        except ImportError as error:
            raise StoreUnavailable(
                f"url: PostgreSQL needs psycopg ({error}); pip install 'omnirelay-dagster[postgres]'"
            ) from error
        return PostgresStore(parsed, config, clock)
    from lease_core.store.sqlite import SqliteStore

    return SqliteStore(parsed, config, clock)
