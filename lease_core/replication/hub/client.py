"""A connection to the hub, and what its errors mean."""

from __future__ import annotations

import threading
from typing import Any

from lease_core.errors import EventsPruned, InvalidInput, LeaseError, StoreUnavailable
from lease_core.replication.hub import wire
from lease_core.replication.hub.addresses import parse
from lease_core.replication.hub.credentials import PathLike, client_credentials


class HubClient:
    """Opens a channel when it is first needed. In the clear to this machine, by TLS to any other, unless told."""

    def __init__(
        self,
        address: str,
        *,
        ca: PathLike | None = None,
        certificate: PathLike | None = None,
        key: PathLike | None = None,
        insecure: bool = False,
        server_name: str | None = None,
    ) -> None:
        parse("address", address)
        self.address = address
        self._credentials = client_credentials(address, ca, certificate, key, insecure)
        self._server_name = server_name
        self._lock = threading.Lock()
        self._channel: Any = None
        self._stub: Any = None

    def stub(self) -> Any:
        with self._lock:
            if self._stub is None:
                self._channel = self._open()
                self._stub = wire.services().HubStub(self._channel)
            return self._stub

    def close(self) -> None:
        with self._lock:
            channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            channel.close()

    def _open(self) -> Any:
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", 10_000),  # a network that went silent is noticed
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),  # how long to wait is for the caller to say
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self._server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._server_name))
        if self._credentials is None:
            return wire.grpc().insecure_channel(self.address, options=options)
        return wire.grpc().secure_channel(self.address, self._credentials, options=options)


def said(error: Any) -> str:
    """What a failed call says, in a line."""
    return f"hub: {error.code().name} {(error.details() or '')[:300]}".rstrip()


def meaning(error: Any) -> LeaseError:
    """The error to raise for a call that failed while reading."""
    code = wire.grpc().StatusCode
    match error.code():
        case code.INVALID_ARGUMENT:
            field, _, problem = (error.details() or "").partition(": ")
            return InvalidInput(field, problem)
        case code.OUT_OF_RANGE:
            after, oldest = (error.details() or "0 1").split()
            return EventsPruned(int(after), int(oldest))
        case _:
            return StoreUnavailable(said(error))
