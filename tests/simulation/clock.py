"""A clock that goes when it is told to, also backwards."""

from __future__ import annotations

START = 1_700_000_000_000_000


class FakeClock:
    """Gives epoch seconds, as ``LeaseQueue.open(clock=...)`` wants them; keeps whole microseconds."""

    def __init__(self, micros: int = START) -> None:
        self.micros = micros

    def __call__(self) -> float:
        return self.micros / 1_000_000

    def move(self, seconds: float) -> None:
        self.micros = max(START // 2, self.micros + round(seconds * 1_000_000))
