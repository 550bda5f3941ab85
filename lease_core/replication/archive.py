"""A live log and its archive as one: what was pruned is read from the copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from lease_core.errors import EventsPruned
from lease_core.model import LeaseEvent
from lease_core.replication.contract import EventSource
from lease_core.replication.errors import CorruptCopy, HistoryDiffers
from lease_core.replication.same_event import same_event

_PAGE = 1_000


class Prunable(EventSource, Protocol):
    """A log that can forget, such as a queue's."""

    def prune_events(self, *, before: int | None = None, older_than: float | None = None) -> int: ...


class WithArchive:
    """A source that gives the events of ``live``, and those it has pruned from ``copy``, without a seam.

    Where the two meet they must tell the same: a copy of another queue, though it has the same name, is refused with
    ``HistoryDiffers``. Whatever else ``live`` can do (``stats``, ``now``, keeping checkpoints), it does here too.
    """

    def __init__(self, live: EventSource, copy: EventSource) -> None:
        self._live, self._copy = live, copy
        self._compared = False

    def events(self, after: int = 0, limit: int = 1_000) -> Sequence[LeaseEvent]:
        """Up to ``limit`` events above ``after``. Raises ``EventsPruned`` if the copy does not have them either."""
        try:
            return self._live.events(after, limit)
        except EventsPruned as gap:
            self._compare(gap.oldest)
            found = self._copy.events(after, min(limit, gap.oldest - 1 - after))
            if not found or found[0].sequence_number != after + 1:
                raise
            return found

    def _compare(self, number: int) -> None:
        """See once that the copy is of this log, by the oldest event that both should have."""
        if self._compared:
            return
        try:
            ours, theirs = self._live.events(number - 1, 1), self._copy.events(number - 1, 1)
        except EventsPruned:
            return  # it was pruned further meanwhile: the next call looks again
        except CorruptCopy:
            ours = theirs = []  # whoever reads that far is told of it
        if not check_same(ours[0] if ours else None, theirs[0] if theirs else None, number):
            check_owner(getattr(self._live, "queue_id", None), getattr(self._copy, "queue_id", None), number)
        self._compared = True

    def __getattr__(self, name: str) -> Any:
        if name in ("event_payload", "event_lines"):  # the short ways go past the archive
            raise AttributeError(name)
        return getattr(self._live, name)


def check_same(ours: LeaseEvent | None, theirs: LeaseEvent | None, number: int) -> bool:
    """Refuse an archive that has another event ``number`` than the log. False if it does not have it at all."""
    if ours is None or theirs is None or theirs.sequence_number != number:
        return False
    if not same_event(ours, theirs):
        raise HistoryDiffers(
            f"the archive has another event {number} than the log of {ours.namespace!r}: it is that of another queue "
            "of the same name, or of another past of this one. Nothing was read from it"
        )
    return True


def check_owner(ours: str | None, theirs: str | None, number: int) -> None:
    """Refuse an archive that was begun for another queue, where there is no event to compare them by."""
    if ours and theirs and ours != theirs:
        raise HistoryDiffers(
            f"the archive ends before event {number}, where the log begins, and was begun for another queue ({theirs}, "
            f"not {ours}). If this queue was made from a copy of that one, let a relay archive some more of it: they "
            "are then compared by what both have"
        )


def prune_archived(live: Prunable, copy: EventSource, *, older_than: float | None = None) -> int:
    """Prune from ``live`` what ``copy`` is seen to hold, undamaged, and no reader waits for.

    All that both have is read and compared first; ``HistoryDiffers`` says where a copy is not of this log, and nothing
    is pruned. With ``older_than`` only events of that many seconds go. Gives the number of the last event that is gone.
    """
    confirmed, size = _oldest(live) - 1, _PAGE
    while True:
        try:
            theirs = copy.events(confirmed, size)
        except CorruptCopy as damage:
            if damage.last_good <= confirmed:
                break
            size = damage.last_good - confirmed  # as far as it is good
            continue
        ours = live.events(confirmed, len(theirs)) if theirs else []
        if not theirs or theirs[0].sequence_number != confirmed + 1 or not ours:
            break
        for our, their in zip(ours, theirs, strict=False):
            check_same(our, their, our.sequence_number)
        confirmed = ours[-1].sequence_number
    return live.prune_events(before=confirmed + 1, older_than=older_than)


def _oldest(live: EventSource) -> int:
    try:
        live.events(0, 1)
    except EventsPruned as gap:
        return gap.oldest
    return 1
