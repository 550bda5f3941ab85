"""A clock that stands still until it is told to move, so that every timing test is instant and exact."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_START = 1_750_000_000_000_000


class FakeClock:
    """Epoch seconds, kept as whole microseconds."""

    def __init__(self) -> None:
        self.micros = _START

    def __call__(self) -> float:
        return self.micros / 1_000_000

    def advance(self, seconds: float) -> None:
        self.micros += round(seconds * 1_000_000)

    def now(self, plus: float = 0.0) -> datetime:
        """The time as a datetime, ``plus`` so many seconds."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=self.micros + round(plus * 1_000_000))


MICRO = 0.000_001
