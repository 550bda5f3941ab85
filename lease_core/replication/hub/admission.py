"""What becomes of a batch that is offered: values, and the checks that need no store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from lease_core.replication.hub.packing import pack

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


class Packed(NamedTuple):
    """Lines as they are stored, and their SHA-256."""

    digest: bytes
    packing: int
    stored: bytes


@dataclass(frozen=True)
class Offer:
    """A batch that is what it says it is. ``begins`` allows it to be the first, whatever its number."""

    source: str
    namespace: str
    first: int
    last: int
    lines: bytes
    begins: bool = False

    @cached_property
    def packed(self) -> Packed:
        """Made when it is first asked for, which any thread may do."""
        return Packed(hashlib.sha256(self.lines).digest(), *pack(self.lines))


class _Essence(msgspec.Struct, rename="camel", gc=False):
    """What the hub must know of an event. What else is in it is between its writer and its readers."""

    namespace: str
    sequence_number: int
    type: str
    timestamp: datetime


_decoder = msgspec.json.Decoder(_Essence)


def check(source: str, batch: Any) -> Offer | Verdict:
    """The batch as an offer, if each of its lines is JSON and the event that should be there."""
    namespace, first, last, lines = batch.namespace, batch.first, batch.last, batch.lines
    problem = _wrong_name("source", source, 255) or _wrong_name("namespace", namespace, 1024)
    if problem:
        return Verdict("INVALID", reason=problem)
    if not 1 <= first <= last:
        return Verdict("INVALID", reason=f"first, last: not numbers of events ({first} to {last})")
    count = last - first + 1
    if lines.count(b"\n") != count or not lines.endswith(b"\n"):
        return Verdict("INVALID", reason=f"lines: {count} are needed, each ended by a line feed")
    try:
        found = _decoder.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeError):
        return _unreadable(lines, first)
    if len(found) != count:  # a line of blanks is none
        return Verdict("INVALID", reason=f"lines: {len(found)} events where {count} should be")
    numbers, namespaces = [each.sequence_number for each in found], {each.namespace for each in found}
    if namespaces != {namespace} or numbers != list(range(first, last + 1)):
        return _misplaced(found, namespace, first)
    return Offer(source, namespace, first, last, lines, batch.begins)


def _misplaced(found: list[_Essence], namespace: str, first: int) -> Verdict:
    """The answer to a batch with an event that should not be where it is."""
    number, event = next(
        (number, event)
        for number, event in enumerate(found, first)
        if (event.sequence_number, event.namespace) != (number, namespace)
    )
    said = f"event {event.sequence_number} of {event.namespace} stands where {number} should"
    return Verdict("INVALID", reason=said, sequence_number=number)


def _unreadable(lines: bytes, first: int) -> Verdict:
    """The answer to a batch with a line that is not an event, which is found by going through them."""
    for number, line in enumerate(lines.split(b"\n"), first):
        try:
            _decoder.decode(line or b"{}")
        except (msgspec.DecodeError, UnicodeError) as error:
            return Verdict("INVALID", reason=f"not an event: {error}", sequence_number=number)
    return Verdict("INVALID", reason="lines: not events")


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
