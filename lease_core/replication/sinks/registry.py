"""Sinks by the name of their type, for configuration: ours, and any that an installed package adds.

A package adds one by an entry point in the group ``omnirelay.sinks``, whose name is the type and whose value is the
class; the options of the configuration are its arguments, and fitted to their annotations (see ``options``).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from lease_core.errors import InvalidConfig, InvalidInput
from lease_core.replication.contract import Sink
from lease_core.replication.sinks.options import fit_options

GROUP = "omnirelay.sinks"
_HERE = "lease_core.replication.sinks"
_OURS = {
    "memory": f"{_HERE}.memory:MemorySink",
    "jsonl": f"{_HERE}.jsonl:JsonlSink",
    "objects": f"{_HERE}.object_store:ObjectStoreSink",
    "sql": f"{_HERE}.sql:SqlSink",
    "http": f"{_HERE}.http:HttpSink",
    "hub": f"{_HERE}.hub:HubSink",
    "nats": f"{_HERE}.nats:NatsSink",
    "openlineage": f"{_HERE}.openlineage:OpenLineageSink",
}


def sink_types() -> list[str]:
    """The types there are."""
    return sorted({*_OURS, *(point.name for point in entry_points(group=GROUP))})


def make_sink(kind: str, name: str, options: dict[str, Any]) -> Sink:
    """The sink of type ``kind`` with these options. Raises ``InvalidConfig``, which shows no option's value."""
    try:
        factory = _class_of(kind)
        sink = factory(name=name, **fit_options(factory, options))
    except InvalidInput as error:  # which of several sinks it is, it cannot know itself
        raise InvalidConfig(f"sinks.{name}.{error.field}", error.problem) from None
    except TypeError as error:
        raise InvalidConfig(f"sinks.{name}", f"wrong options for type {kind}: {error}") from None
    if not isinstance(sink, Sink):
        raise InvalidConfig(f"sinks.{name}.type", f"{kind} is not a sink: it needs a name and deliver(batch)")
    return sink


def _class_of(kind: str) -> Any:
    for point in entry_points(group=GROUP):
        if point.name == kind:
            return point.load()
    if kind not in _OURS:
        raise InvalidConfig("type", f"there is no sink type {kind!r}; there are {', '.join(sink_types())}")
    module, _, attribute = _OURS[kind].partition(":")
    return getattr(import_module(module), attribute)
