"""Storing what many streams offer, with one commit for all that arrived while the last one was under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any, NamedTuple

from lease_core.replication.hub.admission import Offer, Packed, Verdict
from lease_core.replication.hub.schema import why
from lease_core.replication.hub.store import HubStore
from lease_core.replication.hub.telemetry import HubTelemetry

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """An offer that is being packed, or waits to be stored."""

    offer: Offer
    packed: Future[Packed]
    verdict: asyncio.Future[Verdict]


class Writer:
    """The only one that appends. Offers of one stream are stored in the order in which they are made.

    No more than ``most_pending`` bytes wait at any time, one offer excepted: who offers more is made to wait, and does
    not read from its source meanwhile. A commit has about ``group_bytes``, or half of what waits if that is more: less
    than sources keep under way, so that the next batches arrive and are checked while these are stored. Threads of
    their own pack offers as soon as they come: hashing and packing leave the interpreter to others, and the one that
    stores would wait for it each time.
    """

    def __init__(
        self, store: HubStore, group_bytes: int = 4 << 20, most_pending: int = 64 << 20, meter: Any = None
    ) -> None:
        self._store = store
        self.telemetry = HubTelemetry(meter)
        self._group_bytes, self._most_pending = group_bytes, most_pending
        self._waiting: deque[_Waiting] = deque()
        self._pending = 0
        self._work, self._room = asyncio.Event(), asyncio.Event()
        self._stored = asyncio.Condition()
        self._stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub-writer")
        self._packers = ThreadPoolExecutor(2, thread_name_prefix="hub-packer")
        self._task = asyncio.create_task(self._run())
        self.events = 0
        self.commits = 0

    @property
    def pending_bytes(self) -> int:
        """What was offered and is not stored yet."""
        return self._pending

    async def offer(self, offer: Offer) -> asyncio.Future[Verdict]:
        """The verdict to come, once there is room for the offer."""
        size = len(offer.lines)
        while self._pending and self._pending + size > self._most_pending:
            self._room.clear()
            await self._room.wait()
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(offer, self._packers.submit(lambda: offer.packed), verdict))
        self._pending += size
        self._work.set()
        return verdict

    async def wait_for_more(self, seen: int, timeout: float) -> None:
        """Until something was stored since ``commits`` was ``seen``, or for so many seconds."""
        async with self._stored:
            try:
                await asyncio.wait_for(self._stored.wait_for(lambda: self.commits != seen), timeout)
            except TimeoutError:
                return

    async def wake(self) -> None:
        """Let everybody go on who waits for something to be stored."""
        async with self._stored:
            self.commits += 1
            self._stored.notify_all()

    async def prune(self, before: datetime) -> int:
        """Let go of events from before that time, between two commits. Gives the last position that is gone."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.prune, before)

    async def close(self) -> None:
        """Store what was offered, then stop."""
        self._stopping = True
        self._work.set()
        await self._task
        self._packers.shutdown(wait=True)
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            group = self._take()
            if not group and self._stopping:
                return
            if not group:
                self._work.clear()
                continue
            offers = [each.offer for each in group]
            since = time.monotonic()
            verdicts = await self._append(group)
            self.telemetry.judged(offers, verdicts, time.monotonic() - since)
            for each, verdict in zip(group, verdicts, strict=True):
                if not each.verdict.done():
                    each.verdict.set_result(verdict)
            self._pending -= sum(len(offer.lines) for offer in offers)
            self._room.set()
            await self.wake()

    def _take(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size, most = 0, max(self._group_bytes, self._pending // 2)
        while self._waiting and (not group or size + len(self._waiting[0].offer.lines) <= most):
            group.append(self._waiting.popleft())
            size += len(group[-1].offer.lines)
        return group

    async def _append(self, group: list[_Waiting]) -> list[Verdict]:
        offers = [each.offer for each in group]
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._store_packed, group)
        except Exception as error:  # nothing was stored: the sources are told, and come again
            logger.error("the hub cannot store: %s", why(error), exc_info=logger.isEnabledFor(logging.DEBUG))
            return [Verdict("UNAVAILABLE", reason=f"the hub cannot store ({why(error)})")] * len(offers)
        for offer, verdict in zip(offers, found, strict=True):
            if verdict.outcome == "REWRITES_HISTORY":
                logger.warning("%s/%s was refused: %s", offer.source, offer.namespace, verdict.reason)
            elif verdict.outcome == "STORED":
                self.events += offer.last - offer.first + 1
        return found

    def _store_packed(self, group: list[_Waiting]) -> list[Verdict]:
        for each in group:
            each.packed.result()  # waited for here, so that the thread that listens is not woken for each of them
        return self._store.append([each.offer for each in group])
