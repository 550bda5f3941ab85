"""Events as bytes: versioned JSON, one event a line.

Each event carries its ``schemaVersion``. A reader skips fields that it does not know, hands on types that it has never
heard of, and fills in what an older writer left out, so writers and readers may be of different versions, also within
one stream. ``lease-event.schema.json`` next to this file describes the form for readers in other languages.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

import msgspec

from lease_core.model import LeaseEvent
from lease_core.replication.errors import UnreadableEvent

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(LeaseEvent)


def encode_event(event: LeaseEvent) -> bytes:
    """One event as JSON, without a line break in it or after it."""
    return _encoder.encode(event)


def decode_event(data: bytes | str) -> LeaseEvent:
    """The event in ``data``, written by this version or any other. Raises ``UnreadableEvent``."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise UnreadableEvent(str(error)) from None


def encode_events(events: Iterable[LeaseEvent]) -> bytes:
    """Events as JSON, each on a line of its own that ends with a line break."""
    return _encoder.encode_lines(events)


def decode_events(data: bytes | str) -> list[LeaseEvent]:
    """The events that ``encode_events`` wrote. All of them, or ``UnreadableEvent`` with the number of the bad line."""
    try:
        return _decoder.decode_lines(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _located(data, error) from None


def json_schema() -> bytes:
    """The published JSON Schema of one event."""
    return files("lease_core.replication").joinpath("lease-event.schema.json").read_bytes()


def _located(data: bytes | str, error: Exception) -> UnreadableEvent:
    raw = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    for number, line in enumerate(raw.split(b"\n"), 1):
        try:
            if line.strip():
                _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeError) as found:
            return UnreadableEvent(str(found), number)
    return UnreadableEvent(str(error))
