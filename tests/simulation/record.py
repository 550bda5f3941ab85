"""What is kept of histories: how much ran in them, and what is needed to see a failed one again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.report import tell_failure

if TYPE_CHECKING:
    from tests.simulation.driver import History


@dataclass
class Tally:
    """How often each operation ran and each fault fired."""

    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    histories: int = 0
    events: int = 0

    def add(self, other: Tally) -> None:
        self.operations += other.operations
        self.faults += other.faults
        self.histories += other.histories
        self.events += other.events


class HistoryFailed(AssertionError):
    """A history in which the queue did wrong."""

    def __init__(self, history: History, cause: BaseException) -> None:
        super().__init__(history.seed, history.step)
        self.seed, self.step, self.steps = history.seed, history.step, history.steps
        self.url, self.exclusive = history.given_url, history.exclusive
        self.scenario = history.scenario
        self.last = list(history.last)
        self.cause = cause

    def __str__(self) -> str:
        return tell_failure(self)
