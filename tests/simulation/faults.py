"""What goes wrong, and the hooks by which it is brought about in the real code."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock
from uuid import UUID

from lease_core import LeaseQueue, granting, retention
from lease_core.store.base import Query, Row

CRASH_POINTS = ("locked", "half-written", "before-commit", "after-commit")

EVERYWHERE = (
    *(f"crash: {point}" for point in CRASH_POINTS),
    "repeated call",
    "delayed call",
    "reordered calls",
    "pause past expiry",
    "clock forward",
    "clock backward",
    "stale token",
    "forged token",
    "foreign token",
    "change during a read",
)
ON_FILES = ("restart", "busy database")
ON_SERVERS = ("restart", "connection lost", "commit unanswered")


class Crash(BaseException):
    """The process dies here. Not an Exception: nothing may catch it and carry on."""

    def __init__(self, point: str) -> None:
        super().__init__(point)
        self.point = point


class Probe:
    """Watches one call pass the named points, and makes one of them a fault."""

    def __init__(self, point: str | None = None, act: Callable[[], None] | None = None, passes: int = 0) -> None:
        self.point = point
        self.act = act
        self.passes = passes
        self.reached: Counter[str] = Counter()
        self.fired = False

    def __call__(self, point: str) -> None:
        self.reached[point] += 1
        if point != self.point or self.fired:
            return
        if self.passes > 0:
            self.passes -= 1
            return
        self.fired = True
        if self.act is None:
            raise Crash(point)
        self.act()

    @property
    def committed(self) -> bool:
        return self.reached["after-commit"] > 0

    @contextmanager
    def watching(self, queue: LeaseQueue) -> Iterator[Probe]:
        store = queue._store
        store.probe = self
        try:
            yield self
        finally:
            store.probe = None


@contextmanager
def current_wire(queue: LeaseQueue) -> Iterator[Callable[[], Any]]:
    """Gives a function that finds what the PostgreSQL transaction under way talks through."""
    store = queue._store
    begun: list[Any] = []
    begin = store.begin

    def remember(ns: int) -> Any:
        begun.append(begin(ns))
        return begun[-1]

    with mock.patch.object(store, "begin", remember):
        yield lambda: begun[-1]._wire


def cut(wire: Any) -> None:
    """The network between us and the server is gone."""
    with socket.socket(fileno=os.dup(wire.connection.fileno())) as cable:
        cable.shutdown(socket.SHUT_RDWR)


def commit_and_cut(wire: Any) -> None:
    """The commit gets through, but its answer does not."""
    wire.exchange([("COMMIT", ())])
    cut(wire)


@contextmanager
def somebody_writing(path: str) -> Iterator[None]:
    """Another process holds SQLite's write lock and does not let go."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


@contextmanager
def change_between_reads(queue: LeaseQueue, change: Callable[[], None], after: int) -> Iterator[None]:
    """Let ``change`` happen once, after so many of the reads that follow. What one read asks, it asks of one state of
    the database; between two reads of one call, which hold no lock, anything may happen."""
    store = queue._store
    read = store.read
    left = after

    def read_with_a_change(*queries: Query) -> list[list[Row]]:
        nonlocal left
        if left == 0:
            patched.stop()
            change()
            patched.start()
        left -= 1
        return read(*queries)

    patched = mock.patch.object(store, "read", read_with_a_change)
    patched.start()
    try:
        yield
    finally:
        patched.stop()


@contextmanager
def small_bites() -> Iterator[None]:
    """What a call does in steps of some hundreds, so that no transaction grows too large, it does in steps of a few."""
    with (
        mock.patch.object(granting, "EXPIRED_AT_ONCE", 2),
        mock.patch.object(granting, "PROMOTED_AT_ONCE", 2),
        mock.patch.object(retention, "ITEMS_AT_ONCE", 3),
        mock.patch.object(retention, "_LOG_ROWS_AT_ONCE", 3),
    ):
        yield


@contextmanager
def seeded_ids(random: Random) -> Iterator[None]:
    """Lease and queue ids from the seed: they steer the jitter of retries, and so the whole history."""
    with mock.patch("uuid.uuid4", side_effect=lambda: UUID(int=random.getrandbits(128), version=4)):
        yield
