"""A second copy of a queue that follows the first and can take its place."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any, cast

import sqlalchemy as sa

from lease_core.config import QueueConfig
from lease_core.errors import EventsPruned, InvalidInput, StoreError
from lease_core.queue import LeaseQueue
from lease_core.recovery import sealing
from lease_core.recovery.copy import PAGE, Copy, Leases, queue_of
from lease_core.replay import ReplayDiverged
from lease_core.replication.contract import Checkpoints, EventSource
from lease_core.replication.errors import CorruptCopy, HistoryDiffers
from lease_core.store.base import Clock

logger = logging.getLogger(__name__)

_CARRY_EVERY = 5.0
"""Seconds between looks at how far the primary's readers have come."""
_FOR_GOOD = (CorruptCopy, EventsPruned, HistoryDiffers, ReplayDiverged)


class Standby:
    """Follows a primary's log into a database of its own, where nothing else can write, until it is promoted.

        with Standby(primary, "postgresql://standby/fabric") as standby:
            standby.start()
            ...
            queue = standby.promote(primary)

    ``source`` is the primary itself or any copy of its log. Reading the copy is fine at any time: open it with
    ``LeaseQueue.open`` and look. A queue as source keeps its log until this standby has it. With None a copy that is
    there already is not followed any further, only promoted: what is left when all else is lost.
    """

    def __init__(
        self,
        source: EventSource | None,
        url: str | sa.URL,
        *,
        namespace: str | None = None,
        config: QueueConfig | None = None,
        interval: float = 0.2,
        snapshot: Any = None,
        clock: Clock | None = None,
    ) -> None:
        if interval <= 0:
            raise InvalidInput("interval", f"must be more than 0 seconds (got {interval!r})")
        self._source = source
        self._copy = Copy.open(source, url, namespace, config, clock, snapshot)
        self._interval = interval
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._promoted = False
        self.trouble: Exception | None = None
        self._reader = f"standby/{self._copy.name}"
        self._told = self._copy.number
        self._carry_at = 0.0
        try:
            self._register()
        except BaseException:
            self._copy.close()
            raise

    @property
    def name(self) -> str:
        """What a primary that was sealed in favour of this copy says its successor is."""
        return self._copy.name

    @property
    def number(self) -> int:
        """The number of the last event that the copy holds."""
        return self._copy.number

    @property
    def failed(self) -> bool:
        """Whether it has stopped following for good; ``trouble`` says why."""
        return isinstance(self.trouble, _FOR_GOOD)

    def lag(self) -> int | None:
        """How many events the copy is behind, if the source can tell."""
        stats = getattr(self._source, "stats", None)
        return None if stats is None else max(0, int(stats().head) - self.number)

    def follow(self, limit: int = PAGE) -> int:
        """Take in what there is, up to ``limit`` events. Gives how many that were."""
        if self._source is None:
            return 0
        taken = self._copy.advance(self._source, limit)
        if self._told < self._copy.number and isinstance(self._source, Checkpoints):
            try:
                self._source.advance_reader(self._reader, self._copy.number)
            except InvalidInput:  # it was dropped, as that of a standby that was thought to be gone
                self._register()
            self._told = self._copy.number
        if time.monotonic() >= self._carry_at and (queue := queue_of(self._source)):
            self._copy.carry_readers(queue, self._reader)  # should the primary be lost, they are known here
            self._carry_at = time.monotonic() + _CARRY_EVERY
        return taken

    def _register(self) -> None:
        if self._source is not None and isinstance(self._source, Checkpoints):
            self._source.register_reader(self._reader, self._copy.number)

    def start(self) -> None:
        """Follow from a thread until ``stop``. What goes wrong is in ``trouble``; if it may pass, it is tried again."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._keep_following, name=self._reader, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _keep_following(self) -> None:
        pause = self._interval
        while not self._stopping.is_set():
            try:
                busy = self.follow() > 0
                self.trouble, pause = None, self._interval
            except _FOR_GOOD as error:
                self.trouble = error
                logger.error("the standby of %s has stopped: %s", self._copy.namespace, error)
                return
            except Exception as error:  # files, objects and databases go away and come back, each in its own words
                self.trouble, busy, pause = error, False, min(pause * 2, 10.0)
                logger.warning("the standby of %s cannot follow for now: %s", self._copy.namespace, error)
            if not busy:
                self._stopping.wait(pause)

    def promote(
        self, primary: LeaseQueue | None = None, *, primary_is_lost: bool = False, leases: Leases = "keep"
    ) -> LeaseQueue:
        """Take over from ``primary``, which takes no more writes from here on, and open the copy as the queue.

        A queue that this is no copy of is refused with ``HistoryDiffers``, and one that has pruned what is missing here
        with ``EventsPruned``; both go on as they were. Otherwise the primary is sealed in favour of this copy, in a
        transaction of its own; from then on nobody can grant there, and what its log holds is final. Then the rest of
        the log is taken in, so that nothing is lost; then the copy becomes primary. A crash in between leaves no
        primary, never two; promoting again goes on from there.

        The places of its readers and the outcomes of effects that its database has come along.

        If the primary cannot be reached and never will be, say ``primary_is_lost=True``: the copy takes over as of the
        last event it has, and what came after is lost, and so are outcomes that were recorded in its database. If the
        source is the primary, and answers after all, it is sealed as ever. Nobody can keep a primary that lives on,
        unreachable from here, from granting; seal it with ``supersede`` as soon as it is reached. ``leases`` is as in
        ``rebuild``.
        """
        self.stop()
        if (primary is None) == (not primary_is_lost):
            raise InvalidInput(
                "primary", "give the primary, so that it is sealed; or primary_is_lost=True if it is gone for good"
            )
        epoch = 1
        sealed = self._sealed_after_all() if primary is None else self._sealed(primary)
        if sealed is not None:
            primary = primary or cast(LeaseQueue, queue_of(self._source))
            epoch = sealed.epoch
            while self._copy.number < sealed.number:
                if not self._copy.advance(primary, PAGE, sealed.number):
                    raise ReplayDiverged(self._copy.number + 1, "the primary's log ends before its head says it does")
            self._copy.carry(primary, self._reader)
        self._promoted = True
        return self._copy.take_over(epoch + 1, leases)

    def _sealed(self, primary: LeaseQueue) -> sealing.Sealed:
        self._copy.check_history(primary)  # another queue of the same name must not be sealed by mistake
        return self.seal(primary)

    def _sealed_after_all(self) -> sealing.Sealed | None:
        """The primary that was said to be lost is sealed, if it is the source and answers."""
        queue = queue_of(self._source)
        try:
            if queue is None or sealing.follows(queue._store, queue._ns):
                return None  # a copy, as this is
            sealed = self._sealed(queue)
        except (StoreError, EventsPruned, HistoryDiffers) as error:
            logger.warning("the primary is taken for lost and was not sealed: %s", error)
            return None
        logger.warning("the primary that was said to be lost answers, and was sealed")
        return sealed

    def seal(self, primary: LeaseQueue) -> sealing.Sealed:
        """Let ``primary`` take no more writes, in favour of this copy. Repeating it is fine."""
        if primary.namespace != self._copy.namespace:
            raise InvalidInput("primary", f"is {primary.namespace!r}, but this is a copy of {self._copy.namespace!r}")
        return sealing.seal(primary._store, primary._ns, self.name)

    def close(self) -> None:
        """Stop following. The copy stays as it is; a promoted one is closed by whoever has the queue."""
        self.stop()
        if not self._promoted:
            self._copy.close()

    def __enter__(self) -> Standby:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
