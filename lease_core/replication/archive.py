"""A live log and its archive as one: what was pruned is read from the copy."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lease_core.errors import EventsPruned, InvalidInput
from lease_core.model import LeaseEvent
from lease_core.replication.contract import Checkpoints, EventSource
from lease_core.replication.errors import CorruptCopy, HistoryDiffers
from lease_core.replication.same_event import same_event, untagged

_PAGE = 1_000


@runtime_checkable
class _Readers(Checkpoints, Protocol):
    """What keeps places, and can tell them."""

    def drop_reader(self, name: str) -> None: ...

    def readers(self) -> dict[str, int]: ...


class Prunable(EventSource, Protocol):
    """A log that can forget, such as a queue's."""

    def prune_events(self, *, before: int | None = None, older_than: float | None = None) -> int: ...


class WithArchive:
    """A source that gives the events of ``live``, and those it has pruned from ``copy``, without a seam.

    Where the two meet they must tell the same: a copy of another queue, though it has the same name, is refused with
    ``HistoryDiffers``. A shard that the copy is tagged with is left out, since the log has none. Whatever else ``live``
    can do (``stats``, ``now``), it does here too. If it keeps the places of readers, then this does, also of those that
    are still in what was pruned.
    """

    def __new__(cls, live: EventSource, copy: EventSource) -> WithArchive:
        return super().__new__(_KeepsPlaces if cls is WithArchive and isinstance(live, _Readers) else cls)

    def __init__(self, live: EventSource, copy: EventSource) -> None:
        self._live, self._copy = live, copy
        self._compared = False

    @property
    def live(self) -> EventSource:
        return self._live

    def events(self, after: int = 0, limit: int = 1_000) -> Sequence[LeaseEvent]:
        """Up to ``limit`` events above ``after``. Raises ``EventsPruned`` if the copy does not have them either."""
        try:
            return self._live.events(after, limit)
        except EventsPruned as gap:
            self._compare(gap.oldest)
            found = self._copy.events(after, min(limit, gap.oldest - 1 - after))
            if not found:
                raise
            if found[0].sequence_number != after + 1:
                raise EventsPruned(after, min(found[0].sequence_number, gap.oldest)) from None
            return [*map(untagged, found), *self._across(found[-1].sequence_number, gap.oldest, limit - len(found))]

    def _across(self, last: int, oldest: int, limit: int) -> Sequence[LeaseEvent]:
        """What the log goes on with, where a page of the copy ends at it: a short page looks like the end of all."""
        if last + 1 != oldest or limit < 1:
            return []
        try:
            return self._live.events(last, limit)
        except EventsPruned:
            return []  # more was pruned just now: the next call gives it from the copy

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


class _KeepsPlaces(WithArchive):
    """With the places of readers, kept by the live log, which then prunes nothing that they have yet to read.

    It cannot keep a place in what it has pruned already. A reader that is there is registered where the log begins,
    under a name that tells its place: ``relay/late, at 1200 of the archive``. When it moves it is registered anew
    before the old one is dropped, and at the place where the two meet it gets its own name; so whoever is killed in
    between leaves one too many, of which the furthest counts. Under its own name a reader has passed all of the
    archive, so that one that goes on with the log alone is never told to begin after something it has not read.
    """

    _live: Any

    def register_reader(self, name: str, after: int = 0) -> int:
        """The kept place of ``name``, which is ``after`` if it is new. The copy must have what was pruned above it."""
        while True:
            if (known := self._known(name)) is not None:
                return known
            try:
                return int(self._live.register_reader(name, after))
            except EventsPruned as gap:
                self.events(after, 1)  # raises if the copy does not have it, either
                if self._register_in_archive(name, after, gap.oldest - 1):
                    return after

    def _known(self, name: str) -> int | None:
        """Where the reader is, if it is registered. If it is past the archive, no place there is kept any more."""
        if name in self._live.readers():
            self._drop(name)
        return self.readers().get(name)

    def _register_in_archive(self, name: str, after: int, at: int) -> bool:
        try:
            self._live.register_reader(_in_archive(name, after), at)
        except EventsPruned:
            return False  # more was pruned just now
        return True

    def advance_reader(self, name: str, to: int) -> None:
        """Keep that ``name`` has come to ``to``. Never moves back."""
        try:
            self._live.advance_reader(name, to)
        except InvalidInput:
            kept = self._in_archive(name)
            if not kept:
                raise
            begin = min(kept.values())
            if to >= begin:
                self._live.register_reader(name, to)
                self._live.advance_reader(name, to)
            elif to > max(kept):
                self._live.register_reader(_in_archive(name, to), begin)
            else:
                return
            self._drop(name, below=to)

    def drop_reader(self, name: str) -> None:
        """Forget the reader, wherever it is."""
        self._live.drop_reader(name)
        self._drop(name)

    def readers(self) -> dict[str, int]:
        """How far each registered reader has come, in the archive or in the log."""
        places: dict[str, int] = {}
        for kept, cursor in self._live.readers().items():
            name, place = _place(kept, cursor)
            places[name] = max(place, places.get(name, 0))
        return places

    def _in_archive(self, name: str) -> dict[int, int]:
        """The places in the archive that are kept for ``name``, each with where the log is kept from."""
        found = ((_place(kept, cursor), kept, cursor) for kept, cursor in self._live.readers().items())
        return {place: cursor for (owner, place), kept, cursor in found if owner == name != kept}

    def _drop(self, name: str, below: float = math.inf) -> None:
        for place in self._in_archive(name):
            if place < below:
                self._live.drop_reader(_in_archive(name, place))


_IN_ARCHIVE = re.compile(r"(.*), at (\d+) of the archive", re.DOTALL)


def _in_archive(name: str, place: int) -> str:
    return f"{name}, at {place} of the archive"


def _place(kept: str, cursor: int) -> tuple[str, int]:
    """The reader that is kept under a name, and its place."""
    found = _IN_ARCHIVE.fullmatch(kept)
    return (kept, cursor) if found is None else (found[1], int(found[2]))


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
