"""A shop's order events, as files in a landing folder. The same seed always gives the same files.

They have what real feeds have: orders that are sent twice, orders that change later, amounts written in two ways,
times in two time zones, records without an amount, and now and then a file that was cut off half-way.
"""

from __future__ import annotations

import json
import os
import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

ORDERS_PER_FILE = 25
SEED = 2024

_OPENING = datetime(2024, 3, 1, 6, tzinfo=UTC)
_BETWEEN_ORDERS = timedelta(minutes=4)
_ZONES = (UTC, timezone(timedelta(hours=2)))
_COUNTRIES = ("DE", "FR", "NL", "de", "fr ")


def write_files(folder: Path, count: int, *, first: int = 0, seed: int = SEED) -> list[Path]:
    """Drop ``count`` files in the folder, from number ``first`` on. No reader ever sees half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(first, first + count):
        path = folder / f"orders-{number:06}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(file_text(number, seed))
        os.replace(unfinished, path)
        paths.append(path)
    return paths


def file_text(number: int, seed: int = SEED) -> str:
    """The file with this number: new orders, and some that are sent again, as they were or changed."""
    dice = random.Random(f"{seed}/file/{number}")
    start = number * ORDERS_PER_FILE
    events = [order_event(order, 1, seed) for order in range(start, start + ORDERS_PER_FILE)]
    if number:
        events += [order_event(dice.randrange(start), dice.choice((1, 1, 2)), seed) for _ in range(4)]
    dice.shuffle(events)
    text = json.dumps(events, indent=1)
    return text[: len(text) // 2] if number % 23 == 11 else text


def order_event(order: int, revision: int, seed: int = SEED) -> dict[str, Any]:
    """What the shop says about an order. Revisions have later times; the latest one counts."""
    dice = random.Random(f"{seed}/order/{order}/{revision}")
    placed = _OPENING + order * _BETWEEN_ORDERS
    cents = dice.randint(250, 25_000)
    event = {
        "order_id": f"o-{order:07}",
        "revision": revision,
        "placed_at": placed.astimezone(dice.choice(_ZONES)).isoformat(),
        "updated_at": (placed + (revision - 1) * timedelta(hours=3)).isoformat(),
        "country": dice.choice(_COUNTRIES),
        "status": dice.choice(("paid", "paid", "paid", "shipped", "cancelled")),
        "amount": f"{cents / 100:.2f}" if dice.random() < 0.5 else cents,  # "12.50", or 1250 cents
    }
    if dice.random() < 0.01:
        event["amount"] = dice.choice((None, "n/a", -cents))
    return event
