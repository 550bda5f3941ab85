"""Logs and their copies, named on a command line."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lease_core import database_url, sqlite_file
from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.queue import DEFAULT_NAMESPACE, LeaseQueue
from lease_core.replication.contract import EventSource
from lease_core.replication.sinks.jsonl import read_jsonl
from lease_core.replication.sinks.object_store import read_segments
from lease_core.replication.sinks.sql import read_sql

_DATABASES = ("sqlite:", "postgresql:", "postgresql+psycopg:", "postgres:")
_OBJECTS = ("file:", "s3:", "gs:", "az:", "azure:", "abfs:", "abfss:", "adl:", "http:", "https:", "memory:")

_HUB = "hub:host:port/source?ca=PEM&certificate=PEM&key=PEM"
_HUB_OPTIONS = ("ca", "certificate", "key", "server_name", "insecure")

SOURCE_HELP = (
    "where the log is: a queue (sqlite:///path, postgresql://…), segments in an object store (s3://…, gs://…, az://…, "
    "file:///…), JSON lines (jsonl:folder), a table of events (table:sqlite:///path, with ?source=NAME if it has "
    "several), or a hub (hub:host:port/source, with ?ca=PEM&certificate=PEM&key=PEM if it is secured)"
)


def namespace_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--namespace", default=DEFAULT_NAMESPACE, help="whose log it is (%(default)s)")


def open_source(given: str, namespace: str, stack: ExitStack) -> EventSource:
    """The source that ``given`` names; what must be closed is, with the stack."""
    kind, _, rest = given.partition(":")
    if kind == "jsonl":
        return read_jsonl(rest, namespace)
    if kind == "table":
        return _table(rest, namespace)
    if kind == "hub":
        return _hub(rest, namespace, stack)
    if given.startswith(_DATABASES):
        return open_queue(given, namespace, stack)
    if given.startswith(_OBJECTS):
        return _segments(given, namespace)
    raise InvalidInput("source", f"{given.split('://')[0]!r} is no kind of source. It should say {SOURCE_HELP}")


def open_queue(url: str, namespace: str, stack: ExitStack) -> LeaseQueue:
    """The queue at ``url``, which must be there: what was mistyped must not be made, and then be found good."""
    return stack.enter_context(LeaseQueue._open_existing(url, namespace))


def _hub(given: str, namespace: str, stack: ExitStack) -> EventSource:
    """``host:port/source`` or ``unix:path/source``, and behind a ``?`` what the hub is to be reached with."""
    from lease_core.replication.hub import read_hub

    place, _, query = given.partition("?")
    address, _, source = place.rpartition("/") if place.startswith("unix:") else place.partition("/")
    if not address or not source:
        raise InvalidInput("source", f"does not say whose log the hub is to give: add its name, as in {_HUB}")
    options: dict[str, Any] = _options(query)
    if (insecure := options.pop("insecure", "false")) not in ("true", "false"):
        raise InvalidInput("source", f"insecure must be true or false (got {insecure!r})")
    copy = read_hub(address, unquote(source), namespace, insecure=insecure == "true", **options)
    stack.callback(copy.close)
    return copy


def _options(query: str) -> dict[str, str]:
    """What is behind the ``?`` of a hub's address, each once. A ``+`` is one, as paths have it."""
    found: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in _HUB_OPTIONS:
            raise InvalidInput("source", f"a hub has no {name!r}; there are {', '.join(_HUB_OPTIONS)}, as in {_HUB}")
        if not value or name in found:
            raise InvalidInput("source", f"{name} must be given once, with a value, as in {_HUB}")
        found[name] = unquote(value)
    return found


def _table(url: str, namespace: str) -> EventSource:
    """A database's URL. ``source`` in its query is ours, the rest is the database's."""
    parsed = database_url.parsed(url)
    source = parsed.query.get("source", "")
    if not isinstance(source, str):
        raise InvalidInput("source", "is there twice behind the ? of the table's url; give one")
    parsed = parsed.difference_update_query(["source"])
    if parsed.get_backend_name() == "sqlite":
        sqlite_file.check_file(parsed)
    return read_sql(parsed, namespace, source=source)


def _segments(url: str, namespace: str) -> EventSource:
    """A folder that is not there is a store that is away: whoever means to follow it may wait for it."""
    if url.startswith("file:"):
        folder = Path(unquote(url.removeprefix("file:").removeprefix("//")))
        if not folder.is_dir():
            raise StoreUnavailable(f"source: there is no folder {folder}; check the path")
    return read_segments(url, namespace)
