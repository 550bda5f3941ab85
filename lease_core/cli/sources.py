"""Logs and their copies, named on a command line."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import unquote

from lease_core import database_url, sqlite_file
from lease_core.errors import InvalidInput
from lease_core.queue import DEFAULT_NAMESPACE, LeaseQueue
from lease_core.replication.contract import EventSource
from lease_core.replication.sinks.jsonl import read_jsonl
from lease_core.replication.sinks.object_store import read_segments
from lease_core.replication.sinks.sql import read_sql

_DATABASES = ("sqlite:", "postgresql:", "postgresql+psycopg:", "postgres:")
_OBJECTS = ("file:", "s3:", "gs:", "az:", "azure:", "abfs:", "abfss:", "adl:", "http:", "https:", "memory:")

SOURCE_HELP = (
    "where the log is: a queue (sqlite:///path, postgresql://…), segments in an object store (s3://…, gs://…, az://…, "
    "file:///…), JSON lines (jsonl:folder), a table of events (table:sqlite:///path), or a hub (hub:host:port/source)"
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
        from lease_core.replication.hub import read_hub

        address, _, source = rest.partition("/")
        return read_hub(address, source, namespace)
    if given.startswith(_DATABASES):
        return open_queue(given, namespace, stack)
    if given.startswith(_OBJECTS):
        return _segments(given, namespace)
    raise InvalidInput("source", f"{given.split('://')[0]!r} is no kind of source. It should say {SOURCE_HELP}")


def open_queue(url: str, namespace: str, stack: ExitStack) -> LeaseQueue:
    """The queue at ``url``, which must be there: what was mistyped must not be made, and then be found good."""
    return stack.enter_context(LeaseQueue._open_existing(url, namespace))


def _table(url: str, namespace: str) -> EventSource:
    parsed = database_url.parsed(url)
    if parsed.get_backend_name() == "sqlite":
        sqlite_file.check_file(parsed)
    return read_sql(parsed, namespace)


def _segments(url: str, namespace: str) -> EventSource:
    if url.startswith("file:"):
        folder = Path(unquote(url.removeprefix("file:").removeprefix("//")))
        if not folder.is_dir():
            raise InvalidInput("source", f"there is no folder {folder}; check the path")
    return read_segments(url, namespace)
