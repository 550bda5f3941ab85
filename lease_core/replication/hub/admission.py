"""What becomes of a batch that is offered: values, and the checks that need no store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lease_core.replication.codec import decode_events
from lease_core.replication.errors import UnreadableEvent

Outcome = Literal["STORED", "MISSING", "REWRITES_HISTORY", "INVALID", "UNAVAILABLE"]


@dataclass(frozen=True)
class Verdict:
    """The answer to one batch; ``next`` is the number that the hub waits for, where it knows."""

    outcome: Outcome
    next: int = 0
    reason: str = ""
    sequence_number: int = 0


@dataclass(frozen=True)
class Offer:
    """A batch that is what it says it is. ``begins`` allows it to be the first, whatever its number."""

    source: str
    namespace: str
    first: int
    last: int
    lines: bytes
    begins: bool = False


def check(source: str, batch: Any) -> Offer | Verdict:
    """The batch as an offer, if each of its lines is the event that should be there."""
    problem = _wrong_name("source", source, 255) or _wrong_name("namespace", batch.namespace, 1024)
    if problem:
        return Verdict("INVALID", reason=problem)
    if not 1 <= batch.first <= batch.last:
        return Verdict("INVALID", reason=f"first, last: not numbers of events ({batch.first} to {batch.last})")
    count = batch.last - batch.first + 1
    if batch.lines.count(b"\n") != count or not batch.lines.endswith(b"\n"):
        return Verdict("INVALID", reason=f"lines: {count} are needed, each ended by a line feed")
    try:
        events = decode_events(batch.lines)
    except UnreadableEvent as error:
        number = batch.first + (error.line or 1) - 1
        return Verdict("INVALID", reason=f"not an event: {error.problem}", sequence_number=number)
    if len(events) != count:  # a line of blanks is none
        return Verdict("INVALID", reason=f"lines: {len(events)} events where {count} should be")
    for number, event in enumerate(events, batch.first):
        if event.sequence_number != number or event.namespace != batch.namespace:
            said = f"event {event.sequence_number} of {event.namespace} stands where {number} should"
            return Verdict("INVALID", reason=said, sequence_number=number)
    return Offer(source, batch.namespace, batch.first, batch.last, batch.lines, batch.begins)


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
