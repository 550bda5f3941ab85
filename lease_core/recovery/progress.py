"""How far a long piece of work has come, for whoever watches."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lease_core.errors import LeaseError
from lease_core.replication.contract import EventSource
from lease_core.replication.sinks.object_store import SegmentsCopy

Progress = Callable[[int, int | None], None]
"""Called with the number reached and, where it is known, the number to reach."""

_WIDTH = 30
_EVERY = 0.1
_BEYOND = 1 << 62  # above every number
_OVER, _BACK_UP, _NO_MORE = "\r", "\x1b[1A", "\x1b[K"


def on_terminal(title: str, source: EventSource | None = None) -> Bar | None:
    """A bar on standard error if that is a terminal; otherwise nothing. ``source`` says what is to be reached."""
    if not sys.stderr.isatty():
        return None
    return Bar(title, None if source is None else end_of(source))


class Bar:
    """A line that is drawn over and over until the number to reach is there, or until ``end``.

    ``goal`` is the number to reach where whoever reports does not know it. A source may go on meanwhile: the line is
    then drawn anew, further on, rather than once more.
    """

    def __init__(self, title: str, goal: int | None = None) -> None:
        self._title, self._goal = title, goal
        self._began, self._drawn_at = time.monotonic(), 0.0
        self._open = False
        self._done: int | None = None

    def __call__(self, number: int, total: int | None) -> None:
        total = total or self._goal
        total = None if total is None else max(total, number)
        now = time.monotonic()
        if number == self._done or (now - self._drawn_at < _EVERY and number != total):
            return
        back = _OVER if self._done is None else _BACK_UP + _OVER
        print(f"{back}{self._title} {self._line(number, total, now)}{_NO_MORE}", end="", file=sys.stderr, flush=True)
        self._drawn_at, self._open, self._done = now, True, None
        if number == total:
            self.end()
            self._done = number

    def end(self) -> None:
        """Leave the line as it is, and the next one to others. Harmless where that was done."""
        if self._open:
            print(file=sys.stderr, flush=True)
            self._open = False

    def _line(self, number: int, total: int | None, now: float) -> str:
        rate = number / max(now - self._began, 1e-6)
        done = "█" * (_WIDTH * number // total) if total else ""
        bar = f"[{done:<{_WIDTH}}] {number:,} of {total:,}" if total else f"{number:,}"
        return f"{bar} events, {rate:,.0f}/s"


def end_of(source: Any) -> int | None:
    """The number of a source's last event, if it can tell without being read from end to end."""
    try:
        if isinstance(source, SegmentsCopy):
            found = deque(source._segments(_BEYOND), maxlen=1)  # the last one alone
            return found[0][1].seal.last if found else None
        if last := getattr(source, "last", None):
            number: int | None = last()
            return number
        stats = getattr(source, "stats", None)
        return None if stats is None else int(stats().head)
    except (LeaseError, OSError):
        return None  # whoever reads it is told what is wrong
