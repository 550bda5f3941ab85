"""The limit on PostgreSQL: three prepared statements, binary parameters, no log, no fencing, no retries."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from benchmarks.contenders.contract import LEASE_SECONDS, Contender, Item

INSERT = "insert into work (resource_id, body) values (%b, %b)"
INSERT_MANY = "insert into work (resource_id, body) select * from unnest(%b::text[], %b::bytea[])"
CLAIM = f"""
    update work set leased_until = now() + interval '{LEASE_SECONDS} s'
    where id = any(array(
        select id from work where leased_until is null order by id limit %b for update skip locked
    ))
    returning id, resource_id, body
"""
DELETE = "delete from work where id = any(%b::bigint[])"


class RawPsycopg(Contender):
    name = "raw-psycopg"
    store = "postgres"
    role = "raw"
    packages = ("psycopg",)
    note = "insert, update..skip locked..returning, delete; no log, no fencing"

    @classmethod
    def prepare(cls, target: str) -> None:
        with psycopg.connect(target) as connection:
            connection.execute("""
                create table work (
                    id bigint generated always as identity primary key,
                    resource_id text not null, body bytea not null, leased_until timestamptz
                )
            """)
            connection.execute("create index work_pending on work (id) where leased_until is null")

    def __init__(self, target: str, worker: str) -> None:
        self._connection = psycopg.connect(target, autocommit=True, prepare_threshold=0)
        self._cursor = self._connection.cursor(binary=True)

    def enqueue(self, items: Sequence[Item]) -> None:
        if len(items) == 1:
            self._cursor.execute(INSERT, items[0])
        else:
            ids, bodies = zip(*items, strict=True)
            self._cursor.execute(INSERT_MANY, (list(ids), list(bodies)))

    def lease(self, limit: int) -> Sequence[tuple[int, str, bytes]]:
        return self._cursor.execute(CLAIM, (limit,)).fetchall()

    def complete(self, leases: Sequence[tuple[int, str, bytes]]) -> None:
        self._cursor.execute(DELETE, ([lease[0] for lease in leases],))

    def close(self) -> None:
        self._connection.close()
