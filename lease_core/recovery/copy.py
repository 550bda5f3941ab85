"""A copy of a queue in a database of its own, which takes events and nothing else."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import TracebackType
from typing import Literal

import sqlalchemy as sa
from msgspec.structs import replace

from lease_core import log, reading
from lease_core.config import QueueConfig
from lease_core.errors import EventsPruned, InvalidInput
from lease_core.log import Gathered
from lease_core.queue import LeaseQueue
from lease_core.recovery import carrying, copying, handing_back, sealing
from lease_core.recovery import snapshot as snapshots
from lease_core.recovery.sealing import Rules
from lease_core.replication.archive import WithArchive
from lease_core.replication.contract import EventSource, good_events
from lease_core.replication.errors import HistoryDiffers
from lease_core.replication.same_event import same_event, untagged
from lease_core.store import migrate, open_store
from lease_core.store.base import Clock, Head, Store

PAGE = 10_000
Leases = Literal["keep", "release"]


class Copy:
    """A sealed copy. ``advance`` brings it forward; ``take_over`` makes it a queue that works."""

    def __init__(self, store: Store, head: Head, name: str, config: QueueConfig) -> None:
        self._store = store
        self._ns = head.ns
        self._config = config
        self.namespace = head.namespace
        self.name = name
        self.number = head.number
        self._unsure = False

    @classmethod
    def open(
        cls,
        source: EventSource | None,
        url: str | sa.URL,
        namespace: str | None,
        config: QueueConfig | None,
        clock: Clock | None = None,
        snapshot: str | Path | None = None,
    ) -> Copy:
        """Find the copy at ``url``, or make it, from ``snapshot`` if there is one; without a source it must be there.

        The rules come from ``config``, or else from the snapshot, or the queue that is copied.
        """
        config = config or QueueConfig()
        start = None if snapshot is None else snapshots.read_header(snapshot)
        told = getattr(source, "namespace", None)
        if start is not None and told not in (None, start.namespace):
            raise InvalidInput("snapshot", f"is of {start.namespace!r}, but the source has the log of {told!r}")
        namespace = namespace or told or (start.namespace if start else None)
        if not namespace:
            raise InvalidInput("namespace", "the source does not say whose log it is; give namespace=")
        store = open_store(url, config, clock)
        try:
            migrate.ensure(store, auto=True)
            if source is None and not sealing.find(store, namespace):
                raise InvalidInput("url", f"there is no copy of namespace {namespace!r} there")
            queue_id, rules = _described(source, start, config)
            head, name = sealing.enter_copy(store, namespace, queue_id, rules)
            if snapshot is not None and head.number == 0:
                snapshots.load(snapshot, store, head.ns)
                head = reading.head(store, head.ns)
        except BaseException:
            store.close()
            raise
        copy = cls(store, head, name, config)
        try:
            if source is not None:
                copy.check_history(source)
        except BaseException:
            store.close()
            raise
        return copy

    def check_history(self, source: EventSource) -> None:
        """The last event here must be what the source has under its number, or the copy is of something else."""
        if self.number == 0:
            return
        if reading.head(self._store, self._ns).pruned == self.number:
            return  # it stands where its snapshot ends
        own = reading.events(self._store, self._ns, self.namespace, self.number - 1, 1)
        try:
            theirs = source.events(self.number - 1, 1)
        except EventsPruned as gap:
            if gap.oldest == self.number + 1:
                return  # a log is pruned up to where its slowest reader is, which may well be this copy
            raise
        if own and (not theirs or not same_event(replace(theirs[0], namespace=self.namespace), own[0])):
            raise HistoryDiffers(
                f"the copy of {self.namespace!r} ends with event {self.number}, and the source has "
                f"{'another' if theirs else 'none'} there; copy from where it began, or into an empty database"
            )

    def advance(self, source: EventSource, limit: int = PAGE, upto: int | None = None) -> int:
        """Take in some ``limit`` more events. Gives how many; 0 says that the source has no more."""
        if self._unsure:  # the last one failed on the way, or its commit got no answer
            self.number, self._unsure = self.head().number, False
        if upto is not None:
            limit = min(limit, upto - self.number)
        if limit <= 0:
            return 0
        groups = self._stored(source, limit, upto) if isinstance(source, LeaseQueue) else []
        if not groups:
            groups = copying.gathered([untagged(event) for event in good_events(source, self.number, limit)])
        if not groups:
            return 0
        before, self._unsure = self.number, True
        self.number, self._unsure = copying.apply(self._store, self._ns, self.name, groups), False
        return self.number - before

    def _stored(self, source: LeaseQueue, limit: int, upto: int | None) -> list[Gathered]:
        """What a queue's log holds next, as it is stored, if that begins where this copy ends."""
        groups: list[Gathered] = []
        for first, last, document in reading.documents(source._store, source._ns, self.number, limit):
            begins_elsewhere = not groups and first != self.number + 1
            if begins_elsewhere or (groups and last > self.number + limit) or (upto is not None and last > upto):
                break
            groups.append(log.parse(first, document))
        return groups

    def head(self) -> Head:
        return reading.head(self._store, self._ns)

    def carry(self, source: LeaseQueue, besides: str = "") -> None:
        """Bring along what ``source`` keeps beside its log."""
        carrying.carry(source, self._store, self._ns, self.number, besides)

    def carry_readers(self, source: LeaseQueue, besides: str = "") -> None:
        """The same, only how far its readers have come."""
        carrying.carry_readers(source, self._store, self._ns, self.number, besides)

    def take_over(self, epoch: int, leases: Leases) -> LeaseQueue:
        """Unseal the copy and open it as the queue that it is now."""
        sealing.unseal(self._store, self._ns, self.name, epoch)
        if leases == "release":
            handing_back.hand_back(self._store, self._ns, self.number)
        return LeaseQueue(self._store, self._ns, self.namespace, self.head().queue_id, self._config)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def queue_of(source: object) -> LeaseQueue | None:
    """The queue that a source is, or that it reads together with its archive; None for what is only a copy."""
    live = source.live if isinstance(source, WithArchive) else source
    return live if isinstance(live, LeaseQueue) else None


def _described(source: object, start: snapshots.Snapshot | None, config: QueueConfig) -> tuple[str, Rules]:
    """The identity and the rules of what is copied, as far as they are known. What ``config`` says goes first."""
    asked = config.model_fields_set
    queue = queue_of(source)
    queue_id, rules = getattr(queue or source, "queue_id", None) or uuid.uuid4().hex, Rules()
    if start is not None:
        queue_id, rules = start.queue_id, Rules(**start.rules)
    elif queue is not None:
        head = reading.head(queue._store, queue._ns)
        queue_id = head.queue_id
        rules = Rules(head.exclusive, head.high_mark, head.low_mark, head.capacity)
    if "exclusive" in asked:
        rules = rules._replace(exclusive=config.exclusive)
    if "high_watermark" in asked:
        rules = rules._replace(high_mark=config.high_watermark, low_mark=config.low_mark)
    if "capacity" in asked:
        rules = rules._replace(capacity=config.capacity)
    return queue_id, rules
