"""The databases under test. Each is a few lines: how to open a queue on it, and what it cannot do by nature."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lease_core import LeaseQueue, QueueConfig


class Backend:
    """A database. ``shared``: other connections and processes can open what one has opened."""

    shared = True

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self, namespace: str, config: QueueConfig, clock: Callable[[], float] | None) -> LeaseQueue:
        return LeaseQueue.open(self.url, namespace, config, clock=clock)

    def engine(self) -> sa.Engine:
        """An engine of the user's own on the same database."""
        return sa.create_engine(self.url)

    def driver_connection(self) -> Any:
        """A connection of the user's own, made with the driver alone."""
        raise NotImplementedError


class SqliteFile(Backend):
    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self.path = path

    def driver_connection(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path)


class SqliteMemory(Backend):
    shared = False

    def __init__(self) -> None:
        super().__init__("sqlite://")


class Postgres(Backend):
    def driver_connection(self) -> Any:
        import psycopg

        return psycopg.connect(sa.make_url(self.url).set(drivername="postgresql").render_as_string(False))
