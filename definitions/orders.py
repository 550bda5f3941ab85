"""A shop's order events, as files in a landing folder, one JSON object a line. The same seed gives the same files.

They have what real feeds have: events that are sent twice, orders that change later, orders that arrive days late,
prices written as numbers and as text, times in several zones, names in several alphabets. And what real feeds should
not have: lines that are no JSON, fields that are missing or of the wrong type, negative quantities, files that are
empty, cut off half-way or far too large.
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
HUGE = 300_000  # bytes; more than the fabric takes

_OPENING = datetime(2024, 3, 1, 6, tzinfo=UTC)
_BETWEEN_ORDERS = timedelta(minutes=4)
_ZONES = (UTC, timezone(timedelta(hours=2)), timezone(-timedelta(hours=5, minutes=30)))
_COUNTRIES = ("DE", "FR", "NL", "de", "fr ")
_PRODUCTS = {
    "Books": ("Weiße Nächte", "Œuvres", "The Sea"),
    "Küche": ("Messer", "Café crème", "鍋"),
    "toys ": ("Ёлка", "Kite", "Robot 🤖"),
}


def write_files(folder: Path, count: int, *, first: int = 0, seed: int = SEED) -> list[Path]:
    """Drop ``count`` files in the folder, from number ``first`` on. No reader ever sees half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(first, first + count):
        path = folder / f"orders-{number:06}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(file_bytes(number, seed))
        os.replace(unfinished, path)
        paths.append(path)
    return paths


def file_bytes(number: int, seed: int = SEED) -> bytes:
    """The file with this number: new orders, one late, and some that are sent again, as they were or changed."""
    dice = random.Random(f"{seed}/file/{number}")
    start = number * ORDERS_PER_FILE
    orders = [(order, 0) for order in range(start, start + ORDERS_PER_FILE) if not _late(order, seed)]
    behind = [order for order in range(max(0, start - 500), max(0, start - 475)) if _late(order, seed)]
    orders += [(order, 0) for order in behind]
    if number:
        orders += [(dice.randrange(start), dice.choice((0, 0, 1, 2))) for _ in range(4)]
    lines = [line(order, revision, dice, seed) for order, revision in orders]
    dice.shuffle(lines)
    return _spoiled(b"\n".join(lines) + b"\n", number)


def _spoiled(data: bytes, number: int) -> bytes:
    """Now and then a file is not what it should be."""
    if number % 23 == 5:
        return b""
    if number % 23 == 11:
        return data[: len(data) // 2]
    if number % 60 == 41:
        return data * (HUGE // len(data) + 1)
    return data


def _late(order: int, seed: int) -> bool:
    """Whether an order comes not with its neighbours, but 20 files later."""
    return random.Random(f"{seed}/late/{order}").random() < 0.04


def line(order: int, revision: int, dice: random.Random, seed: int = SEED) -> bytes:
    """An event as a line of a file. One in fifty is spoiled."""
    event = order_event(order, revision, seed)
    event["placed_at"] = datetime.fromisoformat(event["placed_at"]).astimezone(dice.choice(_ZONES)).isoformat()
    text = json.dumps(event, ensure_ascii=dice.random() < 0.5)
    if dice.random() >= 0.02:
        return text.encode()
    spoiled = (
        text[: dice.randrange(5, len(text) - 1)].encode(),
        b"\xff\xfe" + text.encode(),
        *(json.dumps(event | wrong).encode() for wrong in _WRONG),
        json.dumps({name: value for name, value in event.items() if name != "order_id"}).encode(),
    )
    return dice.choice(spoiled)


_WRONG: tuple[dict[str, Any], ...] = (
    {"price": None},
    {"price": "n/a"},
    {"price": -5},
    {"quantity": -1},
    {"quantity": "three"},
    {"quantity": {"boxes": 2}},
    {"placed_at": "yesterday"},
    {"updated_at": None, "price": "12.345"},
)


def order_event(order: int, revision: int, seed: int = SEED) -> dict[str, Any]:
    """What the shop says about an order. An order keeps its time; later revisions have a later ``updated_at``."""
    fixed = random.Random(f"{seed}/order/{order}")
    dice = random.Random(f"{seed}/order/{order}/{revision}")
    placed = _OPENING + order * _BETWEEN_ORDERS + timedelta(microseconds=fixed.randrange(1_000_000))
    category = fixed.choice(list(_PRODUCTS))
    cents = dice.randint(250, 25_000)
    return {
        "order_id": f"o-{order:07}",
        "placed_at": placed.isoformat(),
        "updated_at": (placed + revision * timedelta(hours=3)).isoformat(),
        "country": fixed.choice(_COUNTRIES),
        "status": dice.choice(("paid", "paid", "paid", "shipped", "cancelled")),
        "category": category,
        "product": fixed.choice(_PRODUCTS[category]),
        "quantity": dice.randint(1, 4),
        "price": f"{cents // 100}.{cents % 100:02}" if dice.random() < 0.5 else cents / 100,
    }
