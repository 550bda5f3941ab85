"""How long to leave a failing sink alone."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Doubling pauses from ``first`` seconds to ``most``, each shortened by up to half at random.

    The randomness keeps many relays from knocking on a recovering sink at the same moment.
    """

    first: float = 0.2
    most: float = 60.0

    def pause(self, failures: int, asked: float | None = None) -> float:
        """Seconds to wait after so many failures in a row, and no less than the sink ``asked`` for."""
        whole = min(self.most, self.first * 2.0 ** min(failures - 1, 60))
        return max(whole * random.uniform(0.5, 1.0), min(asked or 0.0, 3_600.0))
