"""gRPC and the code that is generated from ``hub.proto``, loaded where they are used."""

from __future__ import annotations

from importlib import import_module
from importlib.resources import files
from typing import Any

from lease_core.errors import InvalidInput

MOST_BYTES = 16 << 20
"""How large a batch may be, unless the hub is told otherwise."""
SLACK = 64 << 10
"""What a message needs beyond the events in it."""


def proto() -> bytes:
    """The published description of the service."""
    return files("lease_core.replication.hub").joinpath("hub.proto").read_bytes()


def grpc() -> Any:
    return _load("grpc")


def messages() -> Any:
    return _load("lease_core.replication.hub.hub_pb2")


def services() -> Any:
    return _load("lease_core.replication.hub.hub_pb2_grpc")


def _load(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidInput("hub", f"it needs grpcio ({error}); pip install 'omnirelay-dagster[grpc]'") from error
