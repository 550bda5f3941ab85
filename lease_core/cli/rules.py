"""What a queue lives by and its log does not say: given where it is made anew from a copy that is only a log."""

from __future__ import annotations

import argparse

from lease_core.config import QueueConfig

_RULES = ("exclusive", "high_watermark", "capacity")


def rules_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the log does not say", "by default as in the queue or the snapshot")
    group.add_argument("--exclusive", choices=("resource", "partition", "none"), help="at most one lease per key")
    group.add_argument("--high-watermark", type=int, metavar="ITEMS", help="where backpressure begins")
    group.add_argument("--capacity", type=int, metavar="ITEMS", help="how many items it holds at most")


def rules_given(options: argparse.Namespace) -> QueueConfig:
    """The settings that were given; all others are then those of the source."""
    given = {name: value for name in _RULES if (value := getattr(options, name)) is not None}
    if given.get("exclusive") == "none":
        given["exclusive"] = None
    return QueueConfig(**given)
