"""Telling by one event whether two logs are the same: numbers repeat in every log, events do not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.errors import HistoryDiffers

SHARD = "shard.id"


def same_event(one: LeaseEvent, other: LeaseEvent) -> bool:
    """Whether they are the same but for the shard, with which a sink may have tagged one of them."""
    return untagged(one) == untagged(other)


def check_last(batch: Batch, position: int, held: Callable[[int], LeaseEvent | None]) -> None:
    """Refuse a batch in which the last event that a copy holds, number ``position``, is another one."""
    if not batch.first <= position <= batch.last:
        return
    rest, ours = batch.after(position - 1), held(position)
    if rest is None or ours is None:
        return
    if not same_event(ours, rest.head(1).events[0]):
        raise HistoryDiffers(
            f"the copy of {batch.namespace!r} has another event {position} than the log: it is that of another queue, "
            "or the queue was made anew; give the sink an empty place"
        )


def untagged(event: LeaseEvent) -> LeaseEvent:
    """The event as the queue's own log has it, without the shard."""
    if SHARD not in event.metadata:
        return event
    return msgspec.structs.replace(event, metadata={k: v for k, v in event.metadata.items() if k != SHARD})
