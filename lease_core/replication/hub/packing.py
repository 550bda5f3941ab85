"""Lines as they are stored: packed, since events repeat each other and packing costs less than writing all of it."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from lease_core.errors import InvalidInput

PLAIN, ZLIB, ZSTD = 0, 1, 2
"""How lines can be packed. New ones are plain or by Zstandard; the first hubs used zlib."""
_TOO_SMALL = 512
_each_thread = threading.local()  # what packs must not be used by two at once


def pack_all(batches: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """How each batch of lines is packed, and the bytes: as they came, where packing makes nothing of them smaller.

    All are packed in one go, without the interpreter: a thread that packed one after the other would wait for it
    after each.
    """
    large = [lines for lines in batches if len(lines) >= _TOO_SMALL]
    packed = iter(_packed(large) if large else ())
    return [_smaller(lines, next(packed)) if len(lines) >= _TOO_SMALL else (PLAIN, lines) for lines in batches]


def _smaller(lines: bytes, packed: Any) -> tuple[int, bytes]:
    return (ZSTD, bytes(packed)) if len(packed) < len(lines) else (PLAIN, lines)


def _packed(large: list[bytes]) -> Iterable[Any]:
    packer = _packer()
    if "multi_compress_to_buffer" in zstandard().backend_features:
        return packer.multi_compress_to_buffer(large)  # type: ignore[no-any-return]
    return map(packer.compress, large)  # where the library is not compiled


def _packer() -> Any:
    packer = getattr(_each_thread, "packer", None)
    if packer is None:
        packer = _each_thread.packer = zstandard().ZstdCompressor(level=1)
    return packer


def unpack(packing: int, stored: bytes) -> bytes:
    """The lines that were packed. Raises ``ValueError`` if the bytes are damaged."""
    if packing == PLAIN:
        return stored
    try:
        if packing == ZLIB:
            return zlib.decompress(stored)
        lines: bytes = zstandard().ZstdDecompressor().decompress(stored)
    except (zlib.error, zstandard().ZstdError) as error:
        raise ValueError(str(error)) from None
    return lines


def zstandard() -> Any:
    """The library, loaded where it is used."""
    try:
        import zstandard as library
    except ImportError as error:
        raise InvalidInput("hub", f"it needs zstandard ({error}); pip install 'omnirelay-dagster[grpc]'") from error
    return library
