"""Sinks made of sinks."""

from __future__ import annotations

from typing import Any

import msgspec

from lease_core.errors import InvalidInput
from lease_core.replication.batch import Batch
from lease_core.replication.contract import HoldsPosition, Sink
from lease_core.replication.errors import RefusedForGood
from lease_core.replication.same_event import SHARD


def fan_out(*sinks: Sink, name: str = "fan_out") -> Sink:
    """One sink that delivers to all of ``sinks``, one after the other: it has taken a batch when all of them have.

    They share one checkpoint and one fate. To have each at its own pace, give them to the relay side by side. An event
    that one of them refuses for good goes to the others first: where the relay skips it, it is missing only there.
    What comes again after a failure or a refusal those with a position drop; others see it again.
    """
    if not sinks:
        raise InvalidInput("sinks", "give at least one")
    if all(isinstance(sink, HoldsPosition) for sink in sinks):
        return _PositionedFanOut(name, sinks)
    return _FanOut(name, sinks)


def with_shard(sink: Sink, shard: str) -> Sink:
    """``sink``, with every event tagged ``shard.id`` in its metadata, and the shard on what telemetry says of it."""
    if not shard:
        raise InvalidInput("shard", "must not be empty")
    return _PositionedTagged(sink, shard) if isinstance(sink, HoldsPosition) else _Tagged(sink, shard)


class _FanOut:
    def __init__(self, name: str, sinks: tuple[Sink, ...]) -> None:
        self.name = name
        self._sinks = sinks
        self.linger = max(getattr(sink, "linger", 0.0) for sink in sinks)
        self.compares = any(getattr(sink, "compares", False) for sink in sinks)

    def deliver(self, batch: Batch) -> None:
        refusal: RefusedForGood | None = None
        for sink in self._sinks:
            try:
                sink.deliver(batch)
            except RefusedForGood as error:
                if len(batch) > 1:  # it comes again in halves: who has not seen it yet need not see it twice
                    raise
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        for sink in self._sinks:
            _close(sink)


class _PositionedFanOut(_FanOut):
    def position(self, namespace: str) -> int | None:
        """That of the sink that is furthest behind: the others drop what they have."""
        positions = [sink.position(namespace) for sink in self._sinks if isinstance(sink, HoldsPosition)]
        known = [position for position in positions if position is not None]
        return min(known) if len(known) == len(positions) else None


class _Tagged:
    def __init__(self, sink: Sink, shard: str) -> None:
        self.name = sink.name
        self.shard = shard
        self.linger = getattr(sink, "linger", 0.0)
        self.compares = getattr(sink, "compares", False)
        self._sink: Any = sink

    def deliver(self, batch: Batch) -> None:
        tagged = [
            msgspec.structs.replace(event, metadata={**event.metadata, SHARD: self.shard}) for event in batch.events
        ]
        made = Batch(tagged)
        made.origin = batch.origin
        self._sink.deliver(made)

    def close(self) -> None:
        _close(self._sink)


class _PositionedTagged(_Tagged):
    def position(self, namespace: str) -> int | None:
        position: int | None = self._sink.position(namespace)
        return position


def _close(sink: Any) -> None:
    close = getattr(sink, "close", None)
    if close is not None:
        close()
