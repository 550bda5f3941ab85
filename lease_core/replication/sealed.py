"""Batches of events that prove themselves: the lines, then a line that seals them.

The seal has the numbers of the first and the last event and a SHA-256 over everything that the seal says, the seal
before it and the digest of the events, which is a BLAKE3. So a bit that changed, a line that is gone, a batch that was
cut off, swapped or replaced are all found. Files and objects hold such batches one after the other, and stay readable
by anything that reads JSON lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from io import BytesIO

import msgspec

from lease_core.model import LeaseEvent, Value
from lease_core.replication.batch import Batch
from lease_core.replication.codec import decode_events
from lease_core.replication.digest import digest_of
from lease_core.replication.errors import CorruptCopy, HistoryDiffers, UnreadableEvent
from lease_core.replication.paged import Line

_MARK = b'{"seal":'
_QUEUE = "queue/"


class Seal(Value, frozen=True):
    """What a batch should be. ``previous`` is the digest of the batch before it; of the first, whose log it is."""

    namespace: str
    first: int
    last: int
    count: int
    previous: str
    sha256: str = ""

    @property
    def queue_id(self) -> str | None:
        """The queue whose log the copy is, said by the first batch of a copy that knows."""
        return self.previous.removeprefix(_QUEUE) if self.previous.startswith(_QUEUE) else None

    def line(self) -> bytes:
        return _MARK + self.to_json() + b"}\n"

    def over(self, payload: bytes) -> Seal:
        """The same seal with the digest that it should have over ``payload``."""
        return self.over_digest(digest_of(payload))

    def over_digest(self, digest: bytes) -> Seal:
        """The same for a payload of which this is the digest.

        That the payload comes in by its digest lets it be hashed before it is known what the batch follows.
        """
        bare = msgspec.structs.replace(self, sha256="")
        return msgspec.structs.replace(self, sha256=hashlib.sha256(bare.to_json() + digest).hexdigest())

    def holds(self, payload: bytes) -> bool:
        """Whether this is the seal of ``payload``.

        Older copies have SHA-256 where BLAKE3 is now, and the first ones are sealed over the payload itself.
        """
        return (
            self == self.over(payload)
            or self == self.over_digest(hashlib.sha256(payload).digest())
            or self == self.over_digest(payload)
        )


def seal(batch: Batch, previous: Seal | None) -> tuple[bytes, Seal]:
    """The batch as bytes that prove themselves and follow ``previous``, and their seal."""
    made = next_seal(batch, previous)
    return batch.payload + made.line(), made


def next_seal(batch: Batch, previous: Seal | None) -> Seal:
    """The seal of a batch that follows ``previous``."""
    if previous is not None and batch.first != previous.last + 1:
        raise HistoryDiffers(f"the copy ends at event {previous.last}, and {batch.first} does not follow it")
    chained = previous.sha256 if previous else _QUEUE + batch.origin if batch.origin else ""
    return Seal(batch.namespace, batch.first, batch.last, len(batch), chained).over_digest(batch.digest)


class Torn(Exception):
    """The bytes end before they are sealed, at ``offset``: what a crash leaves of a batch nobody was told of."""

    def __init__(self, offset: int, before: Seal | None) -> None:
        super().__init__(f"not sealed from byte {offset} on")
        self.offset = offset
        self.before = before


class Block(msgspec.Struct):
    """One sealed batch as it was found."""

    seal: Seal
    payload: bytes
    end: int

    def events(self, place: str) -> list[LeaseEvent]:
        """Its events, each checked to be the one that should be there."""
        try:
            events = decode_events(self.payload)
        except UnreadableEvent as error:  # sealed like this: written by something else
            raise CorruptCopy(place, str(error), self.seal.first - 1) from None
        if len(events) != self.seal.count:
            raise CorruptCopy(place, f"{len(events)} events instead of {self.seal.count}", self.seal.first - 1)
        for number, event in enumerate(events, self.seal.first):
            if event.sequence_number != number or event.namespace != self.seal.namespace:
                raise CorruptCopy(place, f"event {event.sequence_number} stands where {number} should", number - 1)
        return events

    def lines(self, place: str) -> Iterator[Line]:
        """Its events as they are written, after the same checks."""
        events, written = self.events(place), BytesIO(self.payload).readlines()
        if len(written) != len(events):
            raise CorruptCopy(place, f"{len(written)} lines for {len(events)} events", self.seal.first - 1)
        return (Line(event.sequence_number, text) for event, text in zip(events, written, strict=True))


def owner_in(seals: Iterator[Seal]) -> str | None:
    """Whose log a copy is, by the first of its seals. None if it does not say, or is damaged there."""
    try:
        first = next(seals, None)
    except CorruptCopy:
        return None  # whoever reads its beginning is told of it
    return None if first is None else first.queue_id


def blocks(data: bytes, place: str, before: Seal | None = None, last_good: int = 0) -> Iterator[Block]:
    """The sealed batches in ``data``, each checked against its seal and the batch before it.

    Raises ``CorruptCopy`` at the first that is not what was written, and ``Torn`` if the end is not sealed.
    """
    start = 0
    while start < len(data):
        mark = start if data.startswith(_MARK, start) else data.find(b"\n" + _MARK, start) + 1
        stop = data.find(b"\n", mark) + 1 if mark >= start and data.startswith(_MARK, mark) else 0
        if not stop:
            raise Torn(start, before)
        found = _checked(data, start, mark, stop)
        problem = found if isinstance(found, str) else _out_of_line(found.seal, before)
        if isinstance(found, str) or problem:
            if isinstance(found, str) and data.find(b"\n" + _MARK, stop - 1) < 0:
                raise Torn(start, before)
            raise CorruptCopy(place, problem or "", before.last if before else last_good)
        yield found
        before, start = found.seal, stop


def _checked(data: bytes, start: int, mark: int, stop: int) -> Block | str:
    """The block between ``start`` and ``stop``, or what is wrong with it."""
    line, payload = data[mark:stop], data[start:mark]
    try:
        said = msgspec.json.decode(line[len(_MARK) : -2], type=Seal)
    except (msgspec.DecodeError, UnicodeError):
        return "a seal cannot be read"
    if not said.holds(payload) or said.line() != line:
        return "the events are not those that were sealed"
    return Block(said, payload, stop)


def _out_of_line(found: Seal, before: Seal | None) -> str:
    """What is wrong with ``found`` coming right after ``before``; nothing, if nothing is."""
    if before is None:
        return ""
    if found.namespace != before.namespace:
        return f"namespace {found.namespace} follows {before.namespace}"
    if found.first > before.last + 1:
        return f"events {before.last + 1} to {found.first - 1} are missing"
    if found.first <= before.last:
        return f"event {found.first} comes again after {before.last}"
    if found.previous != before.sha256:
        return f"the batch from {found.first} on was sealed after another one than is there"
    return ""
