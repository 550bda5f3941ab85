"""A live log and its archive as one: what was pruned is read from the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from lease_core.errors import EventsPruned
from lease_core.model import LeaseEvent
from lease_core.replication.contract import EventSource
from lease_core.replication.errors import CorruptCopy
from lease_core.replication.sealed import Seal


class SealedCopy(EventSource, Protocol):
    """A copy whose batches prove themselves: files or segments."""

    def seals(self, after: int = 0) -> Iterator[Seal]: ...


class Prunable(EventSource, Protocol):
    """A log that can forget, such as a queue's."""

    def prune_events(self, *, before: int | None = None, older_than: float | None = None) -> int: ...


class WithArchive:
    """A source that gives the events of ``live``, and those it has pruned from ``copy``, without a seam.

    Whatever else ``live`` can do (``stats``, ``now``, keeping checkpoints), it does here too.
    """

    def __init__(self, live: EventSource, copy: EventSource) -> None:
        self._live, self._copy = live, copy

    def events(self, after: int = 0, limit: int = 1_000) -> Sequence[LeaseEvent]:
        """Up to ``limit`` events above ``after``. Raises ``EventsPruned`` if the copy does not have them either."""
        try:
            return self._live.events(after, limit)
        except EventsPruned as gap:
            found = self._copy.events(after, min(limit, gap.oldest - 1 - after))
            if not found or found[0].sequence_number != after + 1:
                raise
            return found

    def __getattr__(self, name: str) -> Any:
        if name in ("event_payload", "event_lines"):  # the short ways go past the archive
            raise AttributeError(name)
        return getattr(self._live, name)


def prune_archived(live: Prunable, copy: SealedCopy, *, older_than: float | None = None) -> int:
    """Prune from ``live`` what ``copy`` is seen to hold, undamaged, and no reader waits for.

    Every batch of the copy that the live log still has is read and checked first. With ``older_than`` only events of
    that many seconds go. Gives the number of the last event that is gone.
    """
    confirmed = _oldest(live) - 1
    try:
        for seal in copy.seals(confirmed):
            if seal.first > confirmed + 1:
                break
            confirmed = max(confirmed, seal.last)
    except CorruptCopy as damage:
        confirmed = max(confirmed, damage.last_good)
    return live.prune_events(before=confirmed + 1, older_than=older_than)


def _oldest(live: EventSource) -> int:
    try:
        live.events(0, 1)
    except EventsPruned as gap:
        return gap.oldest
    return 1
