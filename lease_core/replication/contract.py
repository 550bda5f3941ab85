"""What the relay asks of its two ends: a source of events, and sinks that take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.errors import CorruptCopy


class EventSource(Protocol):
    """Anything that gives events by cursor: a queue, a copy of its log, a hub.

    A source may also have ``namespace``; ``event_payload(after, limit)``, which gives the same events encoded, one a
    line, with how many they are, and is then read instead; ``now()`` and ``stats().head``, for telling how far behind a
    sink is; and the methods of ``Checkpoints``, to keep the sinks' places.
    """

    def events(self, after: int, limit: int) -> Sequence[LeaseEvent]:
        """Up to ``limit`` events above number ``after``, in order and without a gap; none only at the end."""


@runtime_checkable
class Sink(Protocol):
    """Where events go. One method and a name make a sink.

    A sink may also have ``position(namespace)``, if it stores how far it has come together with the events: the number
    of the last event that it holds, 0 for none, or None if it cannot tell. The relay then goes by that, so that nothing
    is there twice however often the relay is killed. If it also has ``compares = True``, it raises ``HistoryDiffers``
    for events that are not those it holds under the same numbers; the relay then shows it the last one before it goes
    on, so that a queue that was made anew is not appended to the copy of another. ``sealed = True`` says that it uses
    the ``digest`` of every batch, which is then made ahead. With ``take`` and ``settle`` as in ``Settles`` it gets what
    is at hand before it has to force any of it to disk. While it waits for an answer it may call ``batch.meanwhile``.
    And ``close()``, called when the relay stops.
    """

    @property
    def name(self) -> str:
        """Under this name its checkpoint is kept, so it must stay the same."""

    def deliver(self, batch: Batch) -> None:
        """Take the batch, durably, before returning. The same events may come again after a crash.

        Raises ``RefusedForGood`` for what it will never take. Any other error is retried, after a pause.
        """


@runtime_checkable
class HoldsPosition(Protocol):
    """A sink that knows by itself how far it has come."""

    def position(self, namespace: str) -> int | None: ...


@runtime_checkable
class Settles(HoldsPosition, Protocol):
    """A sink that forces several batches to disk at the cost of one. Its ``deliver`` does both at once.

    Until ``settle`` has returned nothing that was taken counts as delivered: if it raises, or never comes, the sink is
    asked for its position, and must not count what it cannot vouch for. One that does so only in some places has
    ``settles = False`` elsewhere, and is then given batches by ``deliver``.
    """

    def take(self, batch: Batch) -> None:
        """Take the batch as ``deliver`` does, but for its being durable."""

    def settle(self) -> None:
        """Make all that was taken durable."""


@runtime_checkable
class Checkpoints(Protocol):
    """Where the place of each sink is kept. A ``LeaseQueue`` is one: its log is then not pruned past them."""

    def register_reader(self, name: str, after: int = 0) -> int:
        """The kept place of ``name``, which is ``after`` if it is new."""

    def advance_reader(self, name: str, to: int) -> None:
        """Keep that ``name`` has come to ``to``. Never moves back."""


def each_event(source: EventSource, after: int = 0, page: int = 1_000) -> Iterator[LeaseEvent]:
    """All events of ``source`` above ``after``, read a page at a time; of a damaged copy, all that are good first."""
    while found := good_events(source, after, page):
        yield from found
        after = found[-1].sequence_number


def good_events(source: EventSource, after: int, limit: int) -> Sequence[LeaseEvent]:
    """What ``source.events`` gives or, where it raises ``CorruptCopy``, what comes before the damage, if anything does.

    A page is given whole or not at all, so that who reads only one is told of damage; who reads on is told at the next.
    """
    try:
        return source.events(after, limit)
    except CorruptCopy as damage:
        if damage.last_good <= after:
            raise
        return source.events(after, min(limit, damage.last_good - after))
