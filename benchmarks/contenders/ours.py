"""This queue: the log, the fencing and the dedupe are on, because they cannot be switched off."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.contenders.contract import LEASE_SECONDS, Contender, Item
from lease_core import Lease, LeaseQueue, QueueConfig, WorkItem


class _Ours(Contender):
    role = "ours"
    note = "every change logged in its own transaction, every token checked"

    @staticmethod
    def url(target: str) -> str:
        return target

    @classmethod
    def open(cls, target: str, *, migrate: bool) -> LeaseQueue:
        config = QueueConfig(lease_duration=LEASE_SECONDS, durability="full")
        return LeaseQueue.open(cls.url(target), namespace="bench", config=config, auto_migrate=migrate)

    @classmethod
    def prepare(cls, target: str) -> None:
        cls.open(target, migrate=True).close()

    def __init__(self, target: str, worker: str) -> None:
        self._worker = worker
        self._queue = self.open(target, migrate=False)

    def enqueue(self, items: Sequence[Item]) -> None:
        self._queue.enqueue(
            [WorkItem(resource_type="file", resource_id=item.resource_id, body=item.body) for item in items]
        )

    def lease(self, limit: int) -> Sequence[Lease]:
        return self._queue.lease(self._worker, limit=limit)

    def complete(self, leases: Sequence[Lease]) -> None:
        self._queue.complete([lease.token for lease in leases]).raise_if_refused()

    def close(self) -> None:
        self._queue.close()


class OnSqlite(_Ours):
    name = "omnirelay-sqlite"
    store = "sqlite"

    @staticmethod
    def url(target: str) -> str:
        return f"sqlite:///{target}"


class OnPostgres(_Ours):
    name = "omnirelay-postgres"
    store = "postgres"
    packages = ("psycopg", "sqlalchemy")
