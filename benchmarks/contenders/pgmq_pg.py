"""pgmq: its SQL comes from the installed `pgmq` client package, so no extension has to be built.

The client is handed an autocommit connection, as its `conn` argument allows: one round trip a call instead of
the three its own pool makes (begin, call, commit). That is its fastest way, and just as durable.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import psycopg
from pgmq import Message, PGMQueue
from pgmq.install import install_pgmq_from_sql
from psycopg_pool import ConnectionPool

from benchmarks.contenders.contract import LEASE_SECONDS, Contender, Item

QUEUE = "bench"


class Pgmq(Contender):
    name = "pgmq"
    store = "postgres"
    role = "peer"
    packages = ("pgmq", "psycopg")
    note = "messages are deleted, not archived"

    @classmethod
    def prepare(cls, target: str) -> None:
        install_pgmq_from_sql(dsn=target)
        with psycopg.connect(target) as connection:
            connection.execute("select pgmq.create(%s)", (QUEUE,))

    def __init__(self, target: str, worker: str) -> None:
        self._pool = ConnectionPool(target, min_size=1, max_size=1, kwargs={"autocommit": True}, open=True)
        self._queue = PGMQueue(pool=self._pool, init_extension=False)
        self._connection = self._pool.getconn()
        logging.getLogger("pgmq").setLevel(logging.ERROR)

    def enqueue(self, items: Sequence[Item]) -> None:
        messages = [{"resource_id": item.resource_id, "body": item.body.decode()} for item in items]
        if len(messages) == 1:
            self._queue.send(QUEUE, messages[0], conn=self._connection)
        else:
            self._queue.send_batch(QUEUE, messages, conn=self._connection)

    def lease(self, limit: int) -> Sequence[Message]:
        found = self._queue.read(QUEUE, vt=LEASE_SECONDS, qty=limit, conn=self._connection)
        if found is None:
            return []
        return found if isinstance(found, list) else [found]

    def complete(self, leases: Sequence[Message]) -> None:
        if len(leases) == 1:
            self._queue.delete(QUEUE, leases[0].msg_id, conn=self._connection)
        else:
            self._queue.delete_batch(QUEUE, [lease.msg_id for lease in leases], conn=self._connection)

    def close(self) -> None:
        self._pool.putconn(self._connection)
        self._pool.close()
