"""The rules of one history, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from lease_core import QueueConfig
from tests.simulation.model import SECOND, Rules


@dataclass(frozen=True)
class Scenario:
    """Two queues' configurations, and the names that work may have: few, so that items meet under one key."""

    main: dict[str, Any]
    other: dict[str, Any]
    resources: int
    partitions: int
    workers: int
    largest_batch: int
    crash_rate: float
    in_bites: bool  # what the queue does in limited steps is given steps so small that it takes many


def draw(random: Random, exclusive: str | None = None) -> Scenario:
    """``exclusive`` fixes what the first queue is exclusive by; otherwise that is drawn too."""
    main = _config(random)
    if exclusive is not None:
        main["exclusive"] = None if exclusive == "none" else exclusive
    return Scenario(
        main=main,
        other=_config(random),
        resources=random.choice([2, 5, 30]),
        partitions=random.choice([1, 3, 8]),
        workers=random.randint(2, 5),
        largest_batch=random.choice([1, 3, 12]),
        crash_rate=random.choice([0.0, 0.05, 0.2]),
        in_bites=random.random() < 0.25,
    )


def _config(random: Random) -> dict[str, Any]:
    config: dict[str, Any] = {
        "exclusive": random.choice([None, None, "resource", "partition"]),
        "lease_duration": random.choice([0.01, 1.0, 5.0, 30.0]),
        "max_attempts": random.choice([1, 2, 3, 5]),
        "retry_delay": random.choice([0.0, 0.5, 2.0]),
        "retry_delay_cap": random.choice([2.0, 60.0]),
        "retention": random.choice([0.0, 1.0, 5.0, 30.0, 1000.0]),
        "store_timeout": 0.05,
        "durability": "relaxed",
    }
    if random.random() < 0.5:
        high = random.randint(2, 20)
        config["high_watermark"] = high
        if random.random() < 0.5:
            config["low_watermark"] = random.randint(0, high - 1)
    if random.random() < 0.3:
        config["capacity"] = random.randint(config.get("high_watermark", 3), 30)
    return config


def rules_of(config: QueueConfig, in_bites: bool) -> Rules:
    return Rules(
        exclusive=config.exclusive,
        max_attempts=config.max_attempts,
        retry_delay=round(config.retry_delay * SECOND),
        retry_delay_cap=round(config.retry_delay_cap * SECOND),
        high=config.high_watermark,
        low=config.low_mark,
        capacity=config.capacity,
        retention=round(config.retention * SECOND),
        in_bites=in_bites,
    )
