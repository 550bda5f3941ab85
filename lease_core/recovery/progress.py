"""How far a long piece of work has come, for whoever watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Progress = Callable[[int, int | None], None]
"""Called with the number reached and, where it is known, the number to reach."""

_WIDTH = 30


def on_terminal(title: str) -> Progress | None:
    """A bar on standard error if that is a terminal; otherwise nothing."""
    if not sys.stderr.isatty():
        return None
    began, shown = time.monotonic(), 0.0

    def show(number: int, total: int | None) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < 0.1 and number != total:
            return
        shown = now
        rate = number / max(now - began, 1e-6)
        done = "" if not total else "█" * (_WIDTH * number // total)
        bar = f"[{done:<{_WIDTH}}] {number:,} of {total:,}" if total else f"{number:,}"
        end = "\n" if number == total else ""
        print(f"\r{title} {bar} events, {rate:,.0f}/s", end=end, file=sys.stderr, flush=True)

    return show
