"""What is kept under an id: a pinned version, or the outcome of an effect. JSON, with a ``schemaVersion``.

Versions and effects share one space of ids, so that an id used for both is noticed. Readers skip fields they don't
know.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from typing import Any

import msgspec

from lease_core import limits
from lease_core.deterministic.errors import RecordConflict, RecordUnreadable, WrongKind
from lease_core.deterministic.state import MAX_KEY_BYTES, StateStore
from lease_core.errors import InvalidInput
from lease_core.model import Value

EFFECT = "effect"
VERSION = "version"

SUCCEEDED = "succeeded"
FAILED = "failed"

SCHEMA_VERSION = 1


class Failure(Value, frozen=True):
    """A recorded failure: the exception's class name and its message."""

    kind: str
    message: str = ""


class Record(Value, frozen=True):
    """One entry. ``recorded_by`` is drawn anew for each attempt to record, so that a writer knows its own.

    ``recorded_at`` is the writer's clock, for people to read; nothing depends on it. ``about`` says what the effect
    was applied to, where the caller gave it: the same id for something else is a mistake that should be heard of.
    """

    kind: str
    id: str
    recorded_by: str
    recorded_at: datetime
    status: str | None = None
    value: Any = None
    error: Failure | None = None
    version: int | None = None
    about: str | None = None
    fence: int | None = None
    copied_from: str | None = None
    schema_version: int = SCHEMA_VERSION


def new(kind: str, record_id: str, **fields: Any) -> Record:
    return Record(kind, record_id, secrets.token_hex(8), datetime.now(UTC), **fields)


def document(record: Record) -> dict[str, Any]:
    """The record as it is stored; its schema version always shows."""
    built: dict[str, Any] = msgspec.to_builtins(record)
    return {"schemaVersion": record.schema_version, **built}


def check_id(where: str, given: str) -> str:
    return limits.name(where, given, MAX_KEY_BYTES)


def read(kind: str, record_id: str, stored: Any) -> Record:
    """The record, if it is one and of this kind."""
    try:
        record = msgspec.convert(stored, Record)
    except msgspec.ValidationError as error:
        raise RecordUnreadable(
            f"what is stored under {record_id!r} is no record of an effect or a version ({error}): "
            "another program writes to this store; remove it, or use another id"
        ) from error
    if record.kind != kind:
        raise WrongKind(
            f"{record_id!r} is recorded as {_article(record.kind)}, and asked for as {_article(kind)}: "
            "use different ids for different things"
        )
    return record


def find(store: StateStore, kind: str, record_id: str, formerly: str | None = None) -> Record | None:
    """The record of an id. Of one that is being renamed, the record of either, copied to the other."""
    if formerly is None:
        return _get(store, kind, record_id)
    old, now = _get(store, kind, formerly), _get(store, kind, record_id)
    if old is not None:
        return copy(store, old, record_id)
    if now is not None:
        return copy(store, now, formerly)
    return None


def check_renaming(where: str, record_id: str, formerly: str | None) -> None:
    if formerly is None:
        return
    check_id("formerly", formerly)
    if formerly == record_id:
        raise InvalidInput("formerly", f"must be another id than {where}")


def _get(store: StateStore, kind: str, record_id: str) -> Record | None:
    stored = store.get(record_id)
    return None if stored is None else read(kind, record_id, stored)


def copy(store: StateStore, record: Record, to: str) -> Record:
    """The same record under another id. Raises ``RecordConflict`` if a different one is there."""
    copied = msgspec.structs.replace(record, id=to, copied_from=record.id)
    there = read(record.kind, to, store.add(to, document(copied)).value)
    if _substance(there) != _substance(record):
        raise RecordConflict(
            f"{record.id!r} and {to!r} should have the same record while one is being renamed to the other, and have "
            "not: some workers knew only the one id while others knew only the other. Decide which is right, and "
            "remove the other from the store"
        )
    return there


def _substance(record: Record) -> tuple[Any, ...]:
    return record.status, record.value, record.error, record.version


def _article(kind: str) -> str:
    return f"an {kind}" if kind[:1] in "aeiou" else f"a {kind}"
