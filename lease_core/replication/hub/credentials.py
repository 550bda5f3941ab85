"""TLS at both ends. Without it the hub talks to its own machine only, unless it is told to talk to anybody."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

from lease_core.errors import InvalidConfig
from lease_core.replication.hub import wire
from lease_core.replication.hub.addresses import is_local

PathLike = str | os.PathLike[str]


def server_credentials(
    listen: str, certificate: PathLike | None, key: PathLike | None, client_ca: PathLike | None, insecure: bool
) -> Any:
    """What the hub shows and asks for; None to talk in the clear. With ``client_ca`` it is mutual TLS."""
    if certificate is None and key is None:
        if client_ca is not None:
            raise InvalidConfig("client_ca", "needs certificate and key: mutual TLS is TLS first")
        if not insecure and not is_local("listen", listen):
            raise InvalidConfig(
                "listen",
                f"{listen} can be reached from elsewhere: give certificate and key (and client_ca), or say insecure",
            )
        return None
    pair = _pair(certificate, key)
    if insecure:
        raise InvalidConfig("insecure", "contradicts certificate and key: give one or the other")
    roots = None if client_ca is None else _authorities("client_ca", client_ca)
    return wire.grpc().ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def client_credentials(
    address: str, ca: PathLike | None, certificate: PathLike | None, key: PathLike | None, insecure: bool
) -> Any:
    """The same for a client. To another machine it is TLS, by the system's roots if ``ca`` is not given."""
    named = ca is not None or certificate is not None or key is not None
    if insecure and named:
        raise InvalidConfig("insecure", "contradicts ca, certificate and key: give one or the other")
    if insecure or (not named and is_local("address", address)):
        return None
    chain, private = (None, None)
    if certificate is not None or key is not None:
        private, chain = _pair(certificate, key)
    return wire.grpc().ssl_channel_credentials(None if ca is None else _authorities("ca", ca), private, chain)


def read(field: str, path: PathLike) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(field, f"{path} cannot be read ({error.strerror})") from None


def _authorities(field: str, path: PathLike) -> bytes:
    pem = read(field, path)
    _check_certificates(field, path, pem)
    return pem


def _pair(certificate: PathLike | None, key: PathLike | None) -> tuple[bytes, bytes]:
    """The key and the certificate, seen to fit: gRPC says of what it cannot use only that it cannot listen."""
    if certificate is None or key is None:
        raise InvalidConfig("key" if key is None else "certificate", "is missing: they come as a pair")
    pair = read("key", key), read("certificate", certificate)
    _check_certificates("certificate", certificate, pair[1])
    context = _context()
    try:
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidConfig(
            "key", f"{key} is not the key of {certificate} ({_reason(error)}); give its PEM file, without a password"
        ) from None
    return pair


def _check_certificates(field: str, path: PathLike, pem: bytes) -> None:
    try:
        _context().load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidConfig(field, f"{path} holds no certificate ({_reason(error)}); give a PEM file") from None


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # whether a key is strong enough is for gRPC to say
    return context


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or type(error).__name__
