"""The demo fabric: the one place that wires a queue, its Dagster resources and its assets together."""

from typing import Any


def __getattr__(name: str) -> Any:
    """``defs``, for ``dagster dev -m definitions``. Only made when asked for: the queue's own demo needs no Dagster."""
    if name == "defs":
        from definitions.fabric import defs

        return defs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "defs"]
