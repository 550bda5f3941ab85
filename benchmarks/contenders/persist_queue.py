"""persist-queue's SQLite queue with acknowledgements, in WAL with the full sync it gets by default."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from persistqueue import Empty, SQLiteAckQueue

from benchmarks.contenders.contract import BUSY_SECONDS, Contender, Item

CLEAR_EVERY = 1_000  # its get walks over acknowledged rows until they are cleared


class PersistQueue(Contender):
    name = "persist-queue"
    store = "sqlite"
    role = "peer"
    packages = ("persist-queue",)
    batched = frozenset()
    many_processes = False
    note = "one by one; its get selects, then updates: two processes would get the same item"

    @staticmethod
    def connect(target: str) -> SQLiteAckQueue:
        path = Path(target)
        queue = SQLiteAckQueue(str(path.parent), db_file_name=path.name, timeout=BUSY_SECONDS)
        connection: Any = queue._putter
        connection.execute("pragma synchronous = full")  # the default of most builds, made certain
        return queue

    @classmethod
    def prepare(cls, target: str) -> None:
        cls.connect(target).close()

    def __init__(self, target: str, worker: str) -> None:
        self._queue = self.connect(target)
        self._acknowledged = 0

    def enqueue(self, items: Sequence[Item]) -> None:
        for item in items:
            self._queue.put(item._asdict())

    def lease(self, limit: int) -> Sequence[dict[str, Any]]:
        leases: list[dict[str, Any]] = []
        while len(leases) < limit:
            try:
                leases.append(self._queue.get(block=False, raw=True))
            except Empty:
                break
        return leases

    def complete(self, leases: Sequence[dict[str, Any]]) -> None:
        for lease in leases:
            self._queue.ack(lease)
        self._acknowledged += len(leases)
        if self._acknowledged >= CLEAR_EVERY:
            self._queue.clear_acked_data(max_delete=self._acknowledged, keep_latest=0)
            self._acknowledged = 0

    def close(self) -> None:
        self._queue.close()
