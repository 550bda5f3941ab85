"""procrastinate, driven through the job manager as its own worker drives it, without the worker's polling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from procrastinate import App, PsycopgConnector
from procrastinate.jobs import Job, Status

from benchmarks.contenders.contract import AsyncContender, Item

QUEUE = "bench"


class Procrastinate(AsyncContender):
    name = "procrastinate"
    store = "postgres"
    role = "peer"
    packages = ("procrastinate", "psycopg")
    batched = frozenset(("enqueue",))
    note = "defers in batches, fetches and finishes one by one"

    @classmethod
    def prepare(cls, target: str) -> None:
        from procrastinate import SyncPsycopgConnector

        with App(connector=SyncPsycopgConnector(conninfo=target)).open() as app:
            app.schema_manager.apply_schema()

    def __init__(self, target: str, worker: str) -> None:
        super().__init__(target, worker)
        self._app = App(connector=PsycopgConnector(conninfo=target, min_size=1, max_size=1))

        @self._app.task(name="handle", queue=QUEUE)
        async def handle(resource_id: str, body: str) -> None:
            return None

        self._task = handle
        self.wait(self._app.open_async())
        self._worker_id = self.wait(self._app.job_manager.register_worker())

    def enqueue(self, items: Sequence[Item]) -> None:
        arguments: list[dict[str, Any]] = [
            {"resource_id": item.resource_id, "body": item.body.decode()} for item in items
        ]
        if len(arguments) == 1:
            self.wait(self._task.defer_async(**arguments[0]))
        else:
            self.wait(self._task.batch_defer_async(*arguments))

    def lease(self, limit: int) -> Sequence[Job]:
        return self.wait(self._fetch(limit))

    async def _fetch(self, limit: int) -> list[Job]:
        jobs: list[Job] = []
        while len(jobs) < limit:
            job = await self._app.job_manager.fetch_job(queues=[QUEUE], worker_id=self._worker_id)
            if job is None:
                break
            jobs.append(job)
        return jobs

    def complete(self, leases: Sequence[Job]) -> None:
        self.wait(self._finish(leases))

    async def _finish(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            await self._app.job_manager.finish_job(job=job, status=Status.SUCCEEDED, delete_job=False)

    async def aclose(self) -> None:
        await self._app.close_async()
