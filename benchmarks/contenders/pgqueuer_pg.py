"""pgqueuer over asyncpg and uvloop, its first choice, through the queries its own queue manager uses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import EntrypointExecutionParameter, Queries
from pgqueuer.types import QueueEntrypoint, QueueManagerId

from benchmarks.contenders.contract import LEASE_SECONDS, AsyncContender, Item

ENTRYPOINT = "bench"


class PgQueuer(AsyncContender):
    name = "pgqueuer"
    store = "postgres"
    role = "peer"
    packages = ("pgqueuer", "asyncpg")
    note = "completed jobs move to its log table"

    @classmethod
    def prepare(cls, target: str) -> None:
        async def install() -> None:
            connection = await asyncpg.connect(target)
            await Queries(AsyncpgDriver(connection)).install()
            await connection.close()

        asyncio.run(install())

    def __init__(self, target: str, worker: str) -> None:
        super().__init__(target, worker)
        self._connection = self.wait(asyncpg.connect(target))
        self._queries = self.wait(self._attach())
        self._entrypoints = {QueueEntrypoint(ENTRYPOINT): EntrypointExecutionParameter(concurrency_limit=0)}
        self._manager = QueueManagerId(uuid.uuid4())

    async def _attach(self) -> Queries:
        return Queries(AsyncpgDriver(self._connection))

    def enqueue(self, items: Sequence[Item]) -> None:
        payloads: list[bytes | None] = [item.resource_id.encode() + b"\n" + item.body for item in items]
        if len(payloads) == 1:
            self.wait(self._queries.enqueue(ENTRYPOINT, payloads[0]))
        else:
            many = len(payloads)
            self.wait(self._queries.enqueue([ENTRYPOINT] * many, payloads, [0] * many))

    def lease(self, limit: int) -> Sequence[Job]:
        return self.wait(
            self._queries.dequeue(
                batch_size=limit,
                entrypoints=self._entrypoints,
                queue_manager_id=self._manager,
                global_concurrency_limit=None,
                heartbeat_timeout=timedelta(seconds=LEASE_SECONDS),
            )
        )

    def complete(self, leases: Sequence[Job]) -> None:
        self.wait(self._queries.log_jobs([(job, "successful", None) for job in leases]))

    async def aclose(self) -> None:
        await self._connection.close()
