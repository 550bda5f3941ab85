"""The limit on SQLite: three statements, no log, no fencing, no retries."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence

from benchmarks.contenders.contract import BUSY_SECONDS, LEASE_SECONDS, Contender, Item

INSERT = "insert into work (resource_id, body) values (?, ?)"
CLAIM = """
    update work set leased_until = ?
    where id in (select id from work where leased_until is null order by id limit ?)
    returning id, resource_id, body
"""
DELETE = "delete from work where id = ?"
DELETE_MANY = "delete from work where id in (select value from json_each(?))"


class RawSqlite(Contender):
    name = "raw-sqlite3"
    store = "sqlite"
    role = "raw"
    note = "insert, update..returning, delete; no log, no fencing"

    @staticmethod
    def connect(target: str) -> sqlite3.Connection:
        connection = sqlite3.connect(target, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = full")
        return connection

    @classmethod
    def prepare(cls, target: str) -> None:
        connection = cls.connect(target)
        connection.executescript("""
            create table work (
                id integer primary key, resource_id text not null, body blob not null, leased_until real
            );
            create index work_pending on work (id) where leased_until is null;
        """)
        connection.close()

    def __init__(self, target: str, worker: str) -> None:
        self._connection = self.connect(target)

    def enqueue(self, items: Sequence[Item]) -> None:
        if len(items) == 1:
            self._connection.execute(INSERT, items[0])
            return
        self._connection.execute("begin immediate")
        self._connection.executemany(INSERT, items)
        self._connection.execute("commit")

    def lease(self, limit: int) -> Sequence[tuple[int, str, bytes]]:
        return self._connection.execute(CLAIM, (time.time() + LEASE_SECONDS, limit)).fetchall()

    def complete(self, leases: Sequence[tuple[int, str, bytes]]) -> None:
        if len(leases) == 1:
            self._connection.execute(DELETE, leases[0][:1])
        else:
            self._connection.execute(DELETE_MANY, (json.dumps([lease[0] for lease in leases]),))

    def close(self) -> None:
        self._connection.close()
