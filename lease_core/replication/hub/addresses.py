"""Addresses, and whether one can be reached from this machine only."""

from __future__ import annotations

from ipaddress import ip_address

from lease_core.errors import InvalidInput


def parse(field: str, address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; of a ``unix:`` address the whole of it, and 0."""
    if not isinstance(address, str):
        raise InvalidInput(field, f"must be host:port, not {type(address).__name__}")
    if address.startswith("unix:"):
        return address, 0
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise InvalidInput(field, f"must be host:port (got {address!r})")
    return host.strip("[]"), int(port)


def is_local(field: str, address: str) -> bool:
    """Whether only this machine can be at the other end."""
    host, _ = parse(field, address)
    if host.startswith("unix:") or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
