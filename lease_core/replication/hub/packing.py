"""Lines as they are stored: as they came, or packed where that costs less than writing them.

PostgreSQL cuts a large value into pieces of 2 kB, each a row of its own, so packing pays there. SQLite writes it in one
go.
"""

from __future__ import annotations

import zlib

PLAIN, ZLIB = 0, 1
_SAMPLE = 8 << 10
_WORTH_IT = 0.3


def leave(lines: bytes) -> tuple[int, bytes]:
    """The lines as they came."""
    return PLAIN, lines


def pack(lines: bytes) -> tuple[int, bytes]:
    """How the lines are packed, and the bytes. A sample tells whether it is worth it."""
    if len(lines) < _SAMPLE or len(zlib.compress(lines[:_SAMPLE], 1)) > _SAMPLE * _WORTH_IT:
        return PLAIN, lines
    return ZLIB, zlib.compress(lines, 1)


def unpack(packing: int, stored: bytes) -> bytes:
    """The lines that were packed. Raises ``ValueError`` if the bytes are damaged."""
    if packing == PLAIN:
        return stored
    try:
        return zlib.decompress(stored)
    except zlib.error as error:
        raise ValueError(str(error)) from None
