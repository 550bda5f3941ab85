"""What a reader of the log can be told: the options of ``spark.read.format("omnirelay_log")``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lease_core.errors import InvalidInput
from omnirelay_dagster.spark.log_reading import LogHead, RangePruned

EARLIEST = "earliest"
_KNOWN = (
    "url",
    "namespace",
    "from_sequence",
    "to_sequence",
    "partition_size",
    "include_items",
    "columns",
    "max_events_per_trigger",
    "fetch",
    "archive",
)


class LogOptions(NamedTuple):
    """The options, checked. ``url`` and ``archive`` are as they were given: variables in them are replaced where they
    are opened."""

    url: str
    namespace: str
    from_sequence: int | None
    to_sequence: int | None
    partition_size: int
    include_items: bool
    columns: list[str] | None
    max_events_per_trigger: int | None
    fetch: str
    archive: str | None = None

    def first(self, head: LogHead) -> int:
        """The number to begin with. Beginning before what is left of the log is an error, unless asked for."""
        first = head.pruned + 1 if self.from_sequence is None else self.from_sequence
        if first <= head.pruned:
            raise RangePruned(first - 1, head.pruned + 1)
        if first > head.number + 1:
            raise InvalidInput("from_sequence", f"is {first}, but the log ends at {head.number}")
        return first

    def last(self, head: LogHead) -> int:
        """The number to end with: the log's last, if nothing else was asked for."""
        if self.to_sequence is None:
            return head.number
        if self.to_sequence > head.number:
            raise InvalidInput("to_sequence", f"is {self.to_sequence}, but the log ends at {head.number}")
        return self.to_sequence


def read_options(given: Mapping[str, str]) -> LogOptions:
    """The options of a read. What is unknown, missing or makes no sense is refused by name."""
    options = {str(name).lower(): str(value) for name, value in given.items()}
    for name in options:
        if name not in _KNOWN:
            raise InvalidInput(name, f"is not an option of omnirelay_log; there are {', '.join(_KNOWN)}")
    if not options.get("url"):
        raise InvalidInput("url", "is missing; use sqlite:///path, postgresql://user@host/db or ${NAME_OF_A_VARIABLE}")
    start = options.get("from_sequence", "1")
    columns = options.get("columns")
    return LogOptions(
        url=options["url"],
        namespace=options.get("namespace", "resourcelease"),
        from_sequence=None if start.lower() == EARLIEST else _number("from_sequence", start, 1),
        to_sequence=_number("to_sequence", options["to_sequence"], 0) if "to_sequence" in options else None,
        partition_size=_number("partition_size", options.get("partition_size", "100000"), 1),
        include_items=_flag("include_items", options.get("include_items", "false")),
        columns=None if columns is None else [name.strip() for name in columns.split(",")],
        max_events_per_trigger=(
            _number("max_events_per_trigger", options["max_events_per_trigger"], 1)
            if "max_events_per_trigger" in options
            else None
        ),
        fetch=options.get("fetch", "auto"),
        archive=options.get("archive"),
    )


def _number(name: str, text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        also = f" or {EARLIEST!r}" if name == "from_sequence" else ""
        raise InvalidInput(name, f"is {text!r}; use a whole number from {least} on{also}")
    return number


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidInput(name, f"is {text!r}; use true or false")
    return text.lower() == "true"
