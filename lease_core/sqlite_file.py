"""What whoever keeps a SQLite file open must heed: its folder, write-ahead logging, patience with others, and forks."""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

import sqlalchemy as sa

from lease_core.errors import InvalidInput, StoreUnavailable

T = TypeVar("T")


def in_memory(url: sa.URL) -> bool:
    """Whether ``url`` names no file at all."""
    return url.database in (None, "", ":memory:")


def check_folder(url: sa.URL) -> None:
    """Refuse a file in a folder that is not there; SQLite would only say that it cannot open it."""
    if folder := missing_folder(url):
        raise StoreUnavailable(f"url: the directory {folder} does not exist; create it, or change the path")


def missing_folder(url: sa.URL) -> Path | None:
    """The folder that ``url`` names a file in, if there is no such folder."""
    if in_memory(url) or str(url.database).startswith("file:"):
        return None
    folder = Path(str(url.database)).absolute().parent
    return None if folder.is_dir() else folder


def check_file(url: sa.URL) -> None:
    """Refuse a file that is not there; SQLite would make it, and whoever only reads would find it empty and good."""
    if in_memory(url):
        raise InvalidInput("url", "names no file, and memory holds nothing of another process; use sqlite:///path")
    named = str(url.database)
    file = Path(unquote(named.removeprefix("file:")) if named.startswith("file:") else named).absolute()
    if not file.is_file():
        raise StoreUnavailable(f"url: there is no file {file}; check the path")


def write_ahead(connection: sqlite3.Connection) -> None:
    """Let readers and a writer work side by side, where the database can do that."""
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_READONLY:  # a read-only file is read as it is
                raise


def is_busy(error: Exception) -> bool:
    """Whether the driver says that another connection is in the way."""
    cause: Any = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def patiently(act: Callable[[], T], timeout: float) -> T:
    """Do ``act`` as soon as no other process is in the way, for as long as ``timeout`` seconds."""
    deadline = None
    pause = 0.0003
    while True:
        try:
            return act()
        except (sqlite3.OperationalError, sa.exc.OperationalError) as error:
            if not is_busy(error):
                raise
            moment = time.monotonic()
            deadline = deadline or moment + timeout
            if moment > deadline:
                raise
        time.sleep(random.uniform(pause / 2, pause))
        pause = min(pause * 1.3, 0.005)


class HasFile(Protocol):
    """Whoever has connections to a file. ``mutex`` is held by each thread that uses one."""

    mutex: Any

    def let_go(self) -> None:
        """Close all connections; called with the mutex held."""


_open: weakref.WeakSet[HasFile] = weakref.WeakSet()
_opening = threading.RLock()  # held by who adds to those, and while the process forks
_held: list[HasFile] = []


def let_go_before_forks(owner: HasFile) -> None:
    """From now on, close every handle of ``owner`` before this process forks.

    SQLite keeps its locks by process: a child that inherits an open handle believes in locks that only the parent has,
    and can lose what it writes. Both sides open new ones when they need them.
    """
    with _opening:
        _open.add(owner)


def _before_fork() -> None:
    """Wait for one owner after the other, letting others open more meanwhile: who does may hold a mutex waited for."""
    while True:
        _opening.acquire()
        held = set(map(id, _held))
        more = [owner for owner in _open if id(owner) not in held]
        if not more:
            return  # from here on nobody opens a file until the fork is done
        _opening.release()
        for owner in more:
            owner.mutex.acquire()
            _held.append(owner)
            owner.let_go()


def _after_fork_in_parent() -> None:
    _opening.release()
    while _held:
        _held.pop().mutex.release()


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.RLock()
    while _held:
        _held.pop().mutex = threading.RLock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
