"""One queue under test, with everything that is known about it: the model, the audit, and the log as tailed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lease_core import LeaseEvent, LeaseQueue, QueueConfig
from lease_core.errors import EventsPruned
from lease_core.model import to_micros
from tests.simulation import checks
from tests.simulation.audit import Audit
from tests.simulation.clock import FakeClock
from tests.simulation.model import Model, Violation
from tests.simulation.scenario import rules_of


class Site:
    def __init__(
        self, name: str, url: str, namespace: str, config: dict[str, Any], clock: FakeClock, in_bites: bool
    ) -> None:
        self.name = name
        self.url = url
        self.namespace = namespace
        self.config = QueueConfig(**config)
        self.clock = clock
        self.queue = self._open()
        self.model = Model(self.queue.queue_id, rules_of(self.config, in_bites))
        self.audit = Audit(namespace, self.config.exclusive)
        self.log: list[LeaseEvent] = []
        self.pruned = 0
        self.transactions: list[tuple[int, int]] = []  # last number and time of each
        self.readers: dict[str, int] = {}

    def _open(self) -> LeaseQueue:
        queue = LeaseQueue.open(self.url, self.namespace, self.config, clock=self.clock, auto_migrate=True)
        queue._forget_at = float("inf")  # upkeep by real time would make histories differ; it is asked for instead
        return queue

    @property
    def survives_restart(self) -> bool:
        return self.url != "sqlite://"

    def restart(self) -> None:
        """A new process opens the queue; the old one's memory is gone."""
        self.queue.close()
        self.queue = self._open()

    def read_on(self) -> list[LeaseEvent]:
        """The events since the last time, read as a tailing reader does; each is audited."""
        fresh: list[LeaseEvent] = []
        self.audit.latest = max(self.audit.latest, self.clock.micros)
        while more := self._next_events():
            for event in more:
                self.audit.read(event)
            fresh.extend(more)
        self.log.extend(fresh)
        return fresh

    def _next_events(self) -> list[LeaseEvent]:
        try:
            return self.queue.events(after=self.audit.number, limit=1_000)
        except EventsPruned as gap:
            raise Violation(f"a reader that has read up to {self.audit.number} is told: {gap}") from gap

    def check_tables(self, tables: checks.Tables) -> None:
        checks.tables_are_sound(tables, self.model, self.audit)
        self.transactions = [(last, to_micros(self.log[last - 1].timestamp)) for _, last in tables.log]
        if tables.head.pruned != self.pruned:
            raise Violation(f"the log is pruned up to {tables.head.pruned}, not {self.pruned}")

    def notice_what_was_forgotten(self, tables: checks.Tables, allowed: bool, required: bool) -> None:
        """Forgetting finished items is not logged, so the tables decide: all that was due, or nothing of it."""
        gone = {i for i in self.model.items if i not in tables.items}
        due = self.model.forgettable()
        if gone and not allowed:
            raise Violation(f"items {sorted(gone)[:5]} are lost: this call has no business forgetting any")
        if not gone <= due:
            lost = sorted(gone - due)[:5]
            raise Violation(f"items {lost} are lost: {[self.model.items[i].state for i in lost]}")
        partly = gone and not self.model.rules.in_bites
        if gone != due and (required or partly):
            raise Violation(f"items {sorted(due - gone)[:5]} should have been forgotten with the others")
        self.model.forget(gone)

    def events_from(self, after: int) -> Sequence[LeaseEvent]:
        return self.log[after:]

    def close(self) -> None:
        self.queue.close()
