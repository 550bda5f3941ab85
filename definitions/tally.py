"""What the landing folder adds up to, worked out in one pass and without queue, Dagster or pandas, for comparison."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path


@dataclass
class Tally:
    files: int = 0
    bad_files: int = 0
    records: int = 0
    bad_records: int = 0
    orders: int = 0
    days: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Orders that were not cancelled, and their cents, by day (UTC)."""

    @property
    def cents(self) -> int:
        return sum(cents for _, cents in self.days.values())


def tally(folder: Path) -> Tally:
    found = Tally()
    latest: dict[str, tuple[int, str, int]] = {}  # order: revision, day, cents
    cancelled: set[str] = set()
    for path in sorted(folder.glob("*.json")):
        found.files += 1
        try:
            events = json.loads(path.read_text())
        except json.JSONDecodeError:
            found.bad_files += 1
            continue
        for event in events:
            found.records += 1
            cents = _cents(event["amount"])
            if cents is None:
                found.bad_records += 1
                continue
            order, revision = event["order_id"], event["revision"]
            if order in latest and latest[order][0] >= revision:
                continue
            day = datetime.fromisoformat(event["placed_at"]).astimezone(UTC).date().isoformat()
            latest[order] = (revision, day, cents)
            (cancelled.add if event["status"] == "cancelled" else cancelled.discard)(order)
    found.orders = len(latest)
    days: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for order, (_, day, cents) in latest.items():
        if order not in cancelled:
            days[day] = (days[day][0] + 1, days[day][1] + cents)
    found.days = dict(sorted(days.items()))
    return found


def _cents(amount: object) -> int | None:
    if isinstance(amount, int):
        return amount if amount >= 0 else None
    try:
        return int(Decimal(str(amount)) * 100)
    except InvalidOperation:
        return None
