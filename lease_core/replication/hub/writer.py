"""Storing what many streams offer, with one commit for all that arrived while the last one was under way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from lease_core.replication.hub.admission import Offer, Verdict
from lease_core.replication.hub.schema import why
from lease_core.replication.hub.store import HubStore
from lease_core.replication.hub.telemetry import HubTelemetry

logger = logging.getLogger(__name__)

_PATIENCE = 0.004
"""Seconds in which another batch comes from a source that has more to send."""


class _Waiting(NamedTuple):
    """An offer that waits to be stored."""

    offer: Offer
    verdict: asyncio.Future[Verdict]


class Writer:
    """The only one that appends. Offers of one stream are stored in the order in which they are made.

    No more than ``most_pending`` bytes wait at any time, one offer excepted: who offers more is made to wait, and does
    not read from its source meanwhile. A source that waits for each answer gets it as soon as can be. Where sources
    keep several batches under way, a commit waits until half of them have come, so that one half arrives and is
    checked while the other is stored, and a commit is paid for by many; it has about ``group_bytes``, or half of what
    waits if that is more.
    """

    def __init__(
        self, store: HubStore, group_bytes: int = 4 << 20, most_pending: int = 64 << 20, meter: Any = None
    ) -> None:
        self._store = store
        self.telemetry = HubTelemetry(meter)
        self._group_bytes, self._most_pending = group_bytes, most_pending
        self._waiting: deque[_Waiting] = deque()
        self._pending = 0
        self._under_way = self._most_under_way = 0  # batches offered and not answered; the most since a commit
        self._offered_at = 0.0
        self._work, self._enough, self._room = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._room.set()
        self._stored = asyncio.Condition()
        self._stopping = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub-writer")
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
            self._enough.set()
            await self._room.wait()
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(offer, verdict))
        self._pending += size
        self._under_way += 1
        self._offered_at = time.monotonic()
        self._most_under_way = max(self._most_under_way, self._under_way)
        self._work.set()
        if self._has_enough():
            self._enough.set()
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
        self._enough.set()
        await self._task
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self._gather()
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
            self._most_under_way = self._under_way  # so that what was once much is not waited for when it is little
            self._under_way -= len(offers)
            self._room.set()
            await self.wake()

    async def _gather(self) -> None:
        """Wait for half of what sources keep under way, as long as any of it comes."""
        while not self._has_enough():
            patience = self._offered_at + _PATIENCE - time.monotonic()
            if patience <= 0:
                self._most_under_way = self._under_way
                return
            self._enough.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._enough.wait()

    def _has_enough(self) -> bool:
        return (
            len(self._waiting) >= self._most_under_way // 2
            or self._pending >= self._group_bytes
            or not self._room.is_set()
            or self._stopping
        )

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
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self._store.append, offers)
        except Exception as error:  # nothing was stored: the sources are told, and come again
            logger.error("the hub cannot store: %s", why(error), exc_info=logger.isEnabledFor(logging.DEBUG))
            return [Verdict("UNAVAILABLE", reason=f"the hub cannot store ({why(error)})")] * len(offers)
        for offer, verdict in zip(offers, found, strict=True):
            if verdict.outcome == "REWRITES_HISTORY":
                logger.warning("%s/%s was refused: %s", offer.source, offer.namespace, verdict.reason)
            elif verdict.outcome == "STORED":
                self.events += offer.last - offer.first + 1
        return found
