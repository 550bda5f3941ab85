"""What becomes of a batch that is offered: values, and the checks that need no store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from io import BytesIO
from typing import Any, Literal

import msgspec

from lease_core.replication.digest import digest_of

Outcome = Literal["STORED", "MISSING", "REWRITES_HISTORY", "INVALID", "UNAVAILABLE"]


@dataclass(frozen=True)
class Verdict:
    """The answer to one batch; ``next`` is the number that the hub waits for, where it knows.

    ``stored`` is how many of its events had not been there before.
    """

    outcome: Outcome
    next: int = 0
    reason: str = ""
    sequence_number: int = 0
    stored: int = 0


@dataclass(frozen=True)
class Offer:
    """A batch that is what it says it is. ``begins`` allows it to be the first, whatever its number.

    ``digest`` is that of its lines. Who checks a batch takes it too, since hashing is when another thread can
    have the interpreter: a check alone would keep the one that stores waiting all the time.
    """

    source: str
    namespace: str
    first: int
    last: int
    lines: bytes
    digest: bytes
    begins: bool = False

    def above(self, number: int) -> Offer:
        """What is left of it above event ``number``, which is one of its own."""
        rest = b"\n".join(self.lines.split(b"\n")[number - self.first + 1 :])
        return replace(self, first=number + 1, lines=rest, digest=digest_of(rest))


class _Essence(msgspec.Struct, rename="camel", gc=False):
    """What the hub must know of an event. What else is in it is between its writer and its readers."""

    namespace: str
    sequence_number: int
    type: str
    timestamp: datetime


_decoder = msgspec.json.Decoder(_Essence)
_UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


@lru_cache(maxsize=256)
def _decoder_of(namespace: str) -> msgspec.json.Decoder[Any]:
    """Decodes events of this namespace only, and so without making a text of its name for each of them."""
    fields: list[tuple[str, Any]] = [
        ("namespace", Literal[namespace]),
        ("sequence_number", int),
        ("type", str),
        ("timestamp", datetime),
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Essence", fields, rename="camel", gc=False))


def check(source: str, batch: Any, lines: bytes) -> Offer | Verdict:
    """The batch as an offer, if each of its lines is JSON and the event that should be there."""
    namespace, first, last = batch.namespace, batch.first, batch.last
    problem = _wrong_name("source", source, 255) or _wrong_name("namespace", namespace, 1024)
    if problem:
        return Verdict("INVALID", reason=problem)
    if not 1 <= first <= last:
        return Verdict("INVALID", reason=f"first, last: not numbers of events ({first} to {last})")
    if not _is_as_it_should_be(namespace, first, last, lines):
        return _whats_wrong(namespace, first, last, lines)
    return Offer(source, namespace, first, last, lines, digest_of(lines), batch.begins)


def _is_as_it_should_be(namespace: str, first: int, last: int, lines: bytes) -> bool:
    each = BytesIO(lines).readlines()
    if len(each) != last - first + 1 or not lines.endswith(b"\n"):
        return False
    try:
        # line by line: all at once, two on one line and a blank one would pass for two lines
        found = list(map(_decoder_of(namespace).decode, each))
    except _UNREADABLE:
        return False
    return [event.sequence_number for event in found] == list(range(first, last + 1))


def _whats_wrong(namespace: str, first: int, last: int, lines: bytes) -> Verdict:
    """The answer to a batch that is not as it should be, found by going through it."""
    count = last - first + 1
    if lines.count(b"\n") != count or not lines.endswith(b"\n"):
        return Verdict("INVALID", reason=f"lines: {count} are needed, each ended by a line feed")
    for number, line in enumerate(lines.split(b"\n")[:-1], first):
        if said := _whats_wrong_with(line, namespace, number):
            return Verdict("INVALID", reason=said, sequence_number=number)
    return Verdict("INVALID", reason="lines: not events")


def _whats_wrong_with(line: bytes, namespace: str, number: int) -> str:
    try:
        event = _decoder.decode(line)
        if (event.sequence_number, event.namespace) != (number, namespace):
            return f"event {event.sequence_number} of {event.namespace} stands where {number} should"
        _decoder_of(namespace).decode(line)  # which also looks at names that are followed by others
    except _UNREADABLE as error:
        return f"not an event: {error}"
    return ""


def _wrong_name(field: str, value: str, most: int) -> str:
    if not value or len(value) > most or "\x00" in value:
        return f"{field}: must be 1 to {most} characters, none of them NUL"
    return ""


def first_difference(held: bytes, offered: bytes, first: int) -> int | None:
    """The number of the first event that is not the same in both, which begin at ``first`` and are as long.

    Events are compared by what they say, so that two versions of a writer may put their fields in another order.
    """
    if held == offered:
        return None
    for number, (ours, theirs) in enumerate(zip(held.split(b"\n"), offered.split(b"\n"), strict=True), first):
        if ours != theirs and msgspec.json.decode(ours) != msgspec.json.decode(theirs):
            return number
    return None
