"""Events in memory: for tests, and for what lives in the same process."""

from __future__ import annotations

import threading

from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch


class MemorySink:
    """Keeps the events, or the last ``capacity`` of them, in ``kept``; also a source."""

    def __init__(self, name: str = "memory", capacity: int | None = None) -> None:
        self.name = name
        self._capacity = capacity
        self._kept: dict[str, list[LeaseEvent]] = {}
        self._lock = threading.Lock()

    def deliver(self, batch: Batch) -> None:
        with self._lock:
            kept = self._kept.setdefault(batch.namespace, [])
            rest = batch.after(kept[-1].sequence_number if kept else 0)
            kept.extend(rest or ())
            if self._capacity is not None and len(kept) > self._capacity:
                del kept[: len(kept) - self._capacity]

    def position(self, namespace: str) -> int | None:
        with self._lock:
            kept = self._kept.get(namespace)
            return kept[-1].sequence_number if kept else None

    @property
    def kept(self) -> list[LeaseEvent]:
        """All events, namespace by namespace."""
        with self._lock:
            return [event for events in self._kept.values() for event in events]

    def events(self, after: int = 0, limit: int = 1_000) -> list[LeaseEvent]:
        """The kept events above ``after``, if they are of one namespace."""
        return [event for event in self.kept if event.sequence_number > after][:limit]
