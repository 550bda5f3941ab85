"""The digest by which the events of a batch are known: BLAKE3, in a quarter of SHA-256's time, and as hard to forge."""

from __future__ import annotations

from blake3 import blake3


def digest_of(payload: bytes) -> bytes:
    """32 bytes that no other payload has. Other threads may use the interpreter meanwhile."""
    return blake3(payload).digest()
