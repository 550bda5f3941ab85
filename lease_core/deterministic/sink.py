"""Sinks that hand each event of the log to a handler once, however often it is delivered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from lease_core import limits
from lease_core.deterministic.effects import EffectStore, effect_id
from lease_core.deterministic.state import MAX_KEY_BYTES
from lease_core.model import LeaseEvent

if TYPE_CHECKING:
    import sqlalchemy as sa

EventEffectId = Callable[[LeaseEvent], str]


class DeterministicSink:
    """Calls ``handler(event)`` under the event's effect id, and never again once that is recorded.

    A batch that is delivered again, in whole or in part, after a crash or by a second relay, goes on where the record
    ends. What the handler returns is not kept. If it raises, nothing is recorded for that event, those before it
    stand, and the error goes to the relay, which will deliver again. A crash in the moment between the handler's effect
    and its record runs that one event's handler again: give it ``sink.effect_id(event)`` as an idempotency key, or use
    ``TransactionalSink``, for which there is no such moment.
    """

    def __init__(
        self,
        handler: Callable[[LeaseEvent], object],
        effects: EffectStore,
        *,
        name: str = "deterministic",
        change_id: str | None = None,
        effect_id: EventEffectId | None = None,
    ) -> None:
        """Ids are ``{change_id}/seq/{sequence_number}``, with ``{name}/{namespace}`` as the change id unless one is
        given, or whatever ``effect_id(event)`` says."""
        self.name = limits.name("name", name, MAX_KEY_BYTES)
        self._handler = handler
        self._effects = effects
        self._change_id = change_id
        self._factory = effect_id

    def effect_id(self, event: LeaseEvent) -> str:
        """The id under which this sink applies the event."""
        if self._factory is not None:
            return self._factory(event)
        return effect_id(self._change_id or f"{self.name}/{event.namespace}", event.sequence_number)

    def deliver(self, batch: Iterable[LeaseEvent]) -> None:
        """Apply the events that were not applied yet, in the order given."""
        for event in batch:
            self._effects.run_once(self.effect_id(event), partial(self._apply, event), about=_about(event))

    def _apply(self, event: LeaseEvent) -> None:
        self._handler(event)


class TransactionalSink(DeterministicSink):
    """Calls ``handler(event, connection)`` in one database transaction with the record that it was applied.

    The effects are in the same SQL database as what the handler writes through the connection; a delivery is one
    transaction. Each event is then applied exactly once, whatever crashes whenever.
    """

    def __init__(
        self,
        handler: Callable[[LeaseEvent, sa.Connection], object],
        effects: EffectStore,
        engine: sa.Engine,
        *,
        name: str = "transactional",
        change_id: str | None = None,
        effect_id: EventEffectId | None = None,
    ) -> None:
        super().__init__(lambda _: None, effects, name=name, change_id=change_id, effect_id=effect_id)
        self._handle = handler
        self._engine = engine

    def deliver(self, batch: Iterable[LeaseEvent]) -> None:
        """Apply the events that were not applied yet, in the order given: all of them, or none."""
        with self._engine.begin() as connection:
            effects = self._effects.within(connection)
            for event in batch:
                effects.run_once(
                    self.effect_id(event),
                    partial(self._handle_in, connection, event),
                    about=_about(event),
                )

    def _handle_in(self, connection: sa.Connection, event: LeaseEvent) -> None:
        self._handle(event, connection)


def _about(event: LeaseEvent) -> str:
    """Two logs that reach one sink under the same ids must not hide each other's events."""
    return f"{event.namespace}#{event.sequence_number} {event.type}"
