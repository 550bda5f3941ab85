"""Reading a copy to the letter: what follows its last whole batch is damage, not a batch still being written."""

from __future__ import annotations

from functools import partial

from lease_core.replication.contract import EventSource
from lease_core.replication.paged import Paged
from lease_core.replication.sinks.jsonl import JsonlCopy


def strictly(source: EventSource) -> EventSource:
    """The same source, forgiving nothing. A bit that flipped near the end of a file looks like a torn end."""
    return _Strict(source) if isinstance(source, JsonlCopy) else source


class _Strict:
    def __init__(self, copy: JsonlCopy) -> None:
        self.namespace, self.queue_id = copy.namespace, copy.queue_id
        self.events = Paged(partial(copy.read, strict=True)).events
