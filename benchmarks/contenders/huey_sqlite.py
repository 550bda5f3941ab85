"""huey on SQLite with fsync on. Its dequeue deletes the task, so there is nothing left to complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from huey import SqliteHuey

from benchmarks.contenders.contract import BUSY_SECONDS, Contender, Item


class Huey(Contender):
    name = "huey"
    store = "sqlite"
    role = "peer"
    packages = ("huey",)
    batched = frozenset()
    completes = False
    note = "one by one; dequeue deletes (at most once), so complete is free"

    @classmethod
    def prepare(cls, target: str) -> None:
        SqliteHuey("bench", filename=target, fsync=True, results=False).storage.close()

    def __init__(self, target: str, worker: str) -> None:
        self._huey = SqliteHuey(
            "bench", filename=target, fsync=True, results=False, timeout=BUSY_SECONDS, create_tables=False
        )

        @self._huey.task()  # type: ignore[untyped-decorator]
        def handle(resource_id: str, body: bytes) -> None:
            return None

        self._handle = handle

    def enqueue(self, items: Sequence[Item]) -> None:
        for item in items:
            self._huey.enqueue(self._handle.s(item.resource_id, item.body))

    def lease(self, limit: int) -> Sequence[Any]:
        tasks: list[Any] = []
        while len(tasks) < limit and (task := self._huey.dequeue()) is not None:
            tasks.append(task)
        return tasks

    def complete(self, leases: Sequence[Any]) -> None:
        """Nothing: the task left the database when it was dequeued."""

    def close(self) -> None:
        self._huey.storage.close()
