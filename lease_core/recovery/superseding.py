"""Sealing a primary that was taken for lost and came back, after another has taken its place."""

from __future__ import annotations

import uuid

from lease_core import reading
from lease_core.errors import InvalidInput, QueueSealed
from lease_core.queue import LeaseQueue
from lease_core.recovery import sealing
from lease_core.replication.errors import HistoryDiffers
from lease_core.replication.same_event import same_event


def supersede(primary: LeaseQueue, by: LeaseQueue) -> sealing.Sealed:
    """Seal ``primary``, in whose place ``by`` works already: one that was taken for lost, and came back.

    From then on every write to it raises ``QueueSealed``. What it did since it was taken for lost stays readable there.
    Repeating it is fine. Refused are a queue in the place of itself, one that ``by`` is no copy of
    (``HistoryDiffers``), and one of a later epoch, which has itself taken over since.
    """
    if primary.namespace != by.namespace:
        raise InvalidInput("primary", f"is {primary.namespace!r}, but {by.namespace!r} works in its place")
    if _are_one(primary, by):
        raise InvalidInput("primary", "is the very queue that is to go on: name the one that was lost")
    old, new = reading.head(primary._store, primary._ns), reading.head(by._store, by._ns)
    if old.epoch < 0:
        return sealing.Sealed(-old.epoch, old.number)
    if new.epoch < 0:
        raise QueueSealed("the queue that is to go on is sealed itself: promote it, or name the one that works")
    if old.epoch > new.epoch:
        raise InvalidInput("primary", f"is of epoch {old.epoch}, after {new.epoch}: are the two the wrong way round?")
    _check_same_past(primary, by, max(old.pruned, new.pruned) + 1)
    return sealing.seal(primary._store, primary._ns, f"queue/{by.queue_id}/epoch/{new.epoch}")


def _are_one(one: LeaseQueue, other: LeaseQueue) -> bool:
    """Whether two queues are the same, whatever their addresses: what is kept in one is then seen in the other."""
    mark = f"supersede/{uuid.uuid4().hex}"
    one.register_reader(mark, one.stats().head)
    try:
        return mark in other.readers()
    finally:
        one.drop_reader(mark)


def _check_same_past(primary: LeaseQueue, by: LeaseQueue, number: int) -> None:
    """Compare the first event that both still have. Where they have none in common, their ids decide."""
    ours, theirs = primary.events(number - 1, 1), by.events(number - 1, 1)
    if not (same_event(ours[0], theirs[0]) if ours and theirs else primary.queue_id == by.queue_id):
        raise HistoryDiffers(
            f"{primary.namespace!r} there has another past than the queue that works in its place; it was not sealed"
        )
