"""Settings of commands: what to do about one that is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lease_core.errors import InvalidConfig
from lease_core.replication.settings import PREFIX

T = TypeVar("T")

_TABLES = {"relay": "relay.url", "sinks": "sinks.NAME.type"}  # of a table that is missing, what it has to say
_REQUIRED = "Field required"  # in pydantic's words


def configured(load: Callable[[], T], path: str | None, option: str | None = None) -> T:
    """What ``load`` gives; of a setting that is missing it is said where to give it.

    That is the ``option``, if there is one, the file at ``path``, or one that is yet to be named, or the environment.
    """
    try:
        return load()
    except InvalidConfig as error:
        if error.problem != _REQUIRED:
            raise
        field = _TABLES.get(error.field, error.field)
        variable = PREFIX + field.upper().replace(".", "__")
        ways = [option, f"{field} in {path or 'the file that --config names'}", variable]
        raise InvalidConfig(error.field, f"is missing: give {', or '.join(filter(None, ways))}") from None
