"""What the landing folder adds up to, worked out in one pass and without queue, Dagster, Spark or pandas."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

_LINES = re.compile(rb"\r\n|\r|\n")
_CENT = Decimal("0.01")


class Order(NamedTuple):
    updated_at: datetime
    day: str
    category: str
    product: str
    status: str
    quantity: int
    price: Decimal


@dataclass
class Tally:
    files: int = 0
    records: int = 0
    """Lines of files that could be read, good and bad."""
    problems: dict[str, int] = field(default_factory=dict)
    """What is wrong with files and records, and how often."""
    orders: int = 0
    revenue: dict[tuple[str, str], tuple[int, Decimal]] = field(default_factory=dict)
    """Orders that were not cancelled, and what they are worth, by day (UTC) and category."""
    products: dict[str, Decimal] = field(default_factory=dict)
    """What each product brought in."""

    @property
    def total(self) -> Decimal:
        return sum((worth for _, worth in self.revenue.values()), Decimal(0))


def tally(folder: Path, most_bytes: int) -> Tally:
    """One pass over the files. Those of more than ``most_bytes`` are not looked into."""
    found, problems = Tally(), Counter[str]()
    latest: dict[str, Order] = {}
    for path in sorted(folder.glob("*.json")):
        found.files += 1
        data = path.read_bytes()
        if len(data) > most_bytes or not data.strip():
            problems[f"the file is larger than {most_bytes} bytes" if data.strip() else "the file is empty"] += 1
            continue
        for line in filter(bytes.strip, _LINES.split(data)):
            found.records += 1
            read = _read(line)
            if isinstance(read, list):
                problems.update(read)
                continue
            order_id, order = read
            if order_id not in latest or latest[order_id].updated_at < order.updated_at:
                latest[order_id] = order
    found.orders, found.problems = len(latest), dict(sorted(problems.items()))
    _add_up(found, latest)
    return found


def _add_up(found: Tally, latest: dict[str, Order]) -> None:
    revenue: dict[tuple[str, str], tuple[int, Decimal]] = defaultdict(lambda: (0, Decimal(0)))
    products: dict[str, Decimal] = defaultdict(Decimal)
    for order in latest.values():
        if order.status != "cancelled":
            count, worth = revenue[order.day, order.category]
            revenue[order.day, order.category] = (count + 1, worth + order.quantity * order.price)
            products[order.product] += order.quantity * order.price
    found.revenue, found.products = dict(sorted(revenue.items())), dict(sorted(products.items()))


def _read(line: bytes) -> tuple[str, Order] | list[str]:
    """An order, or what is wrong with it."""
    try:
        event = json.loads(line.decode(), parse_float=Decimal)
    except UnicodeDecodeError:
        return ["not UTF-8"]
    except json.JSONDecodeError:
        return ["not a JSON object"]
    if not isinstance(event, dict):
        return ["not a JSON object"]
    names = ("order_id", "placed_at", "updated_at", "country", "status", "category", "product", "quantity", "price")
    problems = [f"{name} is missing" for name in names if event.get(name) is None]
    values = {
        name: _value(name, event.get(name), problems) for name in ("placed_at", "updated_at", "quantity", "price")
    }
    if problems:
        return problems
    placed: datetime = values["placed_at"]
    return event["order_id"], Order(
        values["updated_at"],
        placed.astimezone(UTC).date().isoformat(),
        event["category"].strip().lower(),
        event["product"].strip(),
        event["status"],
        values["quantity"],
        values["price"],
    )


def _value(name: str, given: Any, problems: list[str]) -> Any:
    if given is None:
        return None
    try:
        if name.endswith("_at"):
            return datetime.fromisoformat(given)
        number = Decimal(given if isinstance(given, str) else str(given))
        if number != number.quantize(_CENT if name == "price" else Decimal(1)):
            raise ValueError(given)
    except (ValueError, TypeError, InvalidOperation):
        what = {"price": "an amount of money", "quantity": "a whole number"}.get(name, "a time with a zone")
        problems.append(f"{name} is not {what}")
        return None
    if number < (0 if name == "price" else 1):
        problems.append(f"{name} is negative" if name == "price" else f"{name} is below 1")
    return number if name == "price" else int(number)
