"""Checks on what callers pass in. Each raises ``InvalidInput`` naming the field and the limit; nothing is written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from lease_core.config import QueueConfig
from lease_core.errors import InvalidInput
from lease_core.model import Lease, LeaseToken, PendingItem, WorkItem

HIGHEST_ID = 2**52
"""Restoring may not set the counter beyond this: the numbers above it stay free for as many items again."""

_MAX_BATCH_BYTES = 64 * 1024 * 1024
_MAX_SECONDS = 366 * 86_400
_PRIORITY = 2**31
_MAX_ATTEMPT = 2**30
_YEARS = range(1970, 9999)


def work_items(items: WorkItem | Iterable[WorkItem], config: QueueConfig) -> list[WorkItem]:
    """The items of one enqueue as a list, each within the limits."""
    listed = _listed("items", items, WorkItem)
    at_most("items", len(listed), config.max_batch)
    total = 0
    for index, item in enumerate(listed):
        try:
            total += _work_item(item, config)
        except InvalidInput as wrong:
            raise InvalidInput(f"items[{index}].{wrong.field}", wrong.problem) from None
    if total > _MAX_BATCH_BYTES:
        raise InvalidInput("items", f"{total} bytes of bodies in one call; split it below {_MAX_BATCH_BYTES}")
    return listed


def pending_items(items: PendingItem | Iterable[PendingItem], config: QueueConfig) -> list[PendingItem]:
    """The items of one restore as a list, each within the limits and with an id that leaves room for others."""
    listed = _listed("items", items, PendingItem)
    at_most("items", len(listed), config.max_batch)
    for index, pending in enumerate(listed):
        try:
            _pending_item(pending, config)
        except InvalidInput as wrong:
            raise InvalidInput(f"items[{index}].{wrong.field}", wrong.problem) from None
    return listed


def _pending_item(pending: PendingItem, config: QueueConfig) -> None:
    if not isinstance(pending, PendingItem):
        raise InvalidInput("type", f"must be a PendingItem, not {type(pending).__name__}")
    _work_item(pending.item, config)
    if not _is_int(pending.sequence_id) or not 1 <= pending.sequence_id <= HIGHEST_ID:
        raise InvalidInput("sequence_id", f"must be from 1 to {HIGHEST_ID}, or it would use up the queue's ids")
    if not _is_int(pending.attempt) or not 0 <= pending.attempt <= _MAX_ATTEMPT:
        raise InvalidInput("attempt", f"must be a whole number from 0 to {_MAX_ATTEMPT}")
    _moment("enqueued_at", pending.enqueued_at)
    for field in ("last_error", "namespace", "queue_id"):
        value = getattr(pending, field)
        if value is not None:
            text(field, value)
    if pending.last_token is not None:
        _token("last_token", pending.last_token)
        text("last_token", pending.last_token.lease_id)
    for record in pending.errors:
        text("errors", record.error)
        _moment("errors", record.at)
        if not _is_int(record.attempt) or not 0 <= record.attempt <= _MAX_ATTEMPT:
            raise InvalidInput("errors", f"attempt must be a whole number from 0 to {_MAX_ATTEMPT}")
        if record.peer_id is not None:
            text("errors", record.peer_id)


def _work_item(item: WorkItem, config: QueueConfig) -> int:
    """Check one item; gives the size of its body."""
    if not isinstance(item, WorkItem):
        raise InvalidInput("type", f"must be a WorkItem, not {type(item).__name__}")
    longest = config.max_id_bytes
    name("resource_type", item.resource_type, longest)
    name("resource_id", item.resource_id, longest)
    if item.partition_key is not None:
        name("partition_key", item.partition_key, longest)
    if item.request_id is not None:
        name("request_id", item.request_id, longest)
    if item.payload_encoding is not None:
        name("payload_encoding", item.payload_encoding, longest)
    if item.attributes or type(item.attributes) is not dict:
        _attributes("attributes", item.attributes, config)
    if not isinstance(item.body, bytes):
        raise InvalidInput("body", f"must be bytes, not {type(item.body).__name__}; encode it first")
    size = len(item.body)
    if size > config.max_body_bytes:
        raise InvalidInput(
            "body", f"{size} bytes, the limit is {config.max_body_bytes}; store it elsewhere and enqueue its address"
        )
    if not _is_int(item.priority) or not -_PRIORITY <= item.priority < _PRIORITY:
        raise InvalidInput("priority", f"must be a whole number from {-_PRIORITY} to {_PRIORITY - 1}")
    if item.not_before is not None:
        _moment("not_before", item.not_before)
    return size


def _attributes(where: str, attributes: dict[str, str], config: QueueConfig) -> None:
    if not isinstance(attributes, dict):
        raise InvalidInput(where, f"must be a dict of str to str, not {type(attributes).__name__}")
    at_most(where, len(attributes), config.max_attributes)
    size = 0
    for key, value in attributes.items():
        name(f"{where} key", key, config.max_id_bytes)
        size += len(text(f"{where}[{key!r}]", value))
    if size > config.max_attribute_bytes:
        raise InvalidInput(where, f"{size} bytes of values, the limit is {config.max_attribute_bytes}; use the body")


def _listed(where: str, given: Any, one: Any) -> list[Any]:
    """One thing or many, as a list."""
    if isinstance(given, one):
        return [given]
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidInput(where, f"must be one or several, not {type(given).__name__}")
    return list(given)


def identity(config: QueueConfig, **given: str | None) -> None:
    """Who is said to be acting: a name each, or nothing."""
    for where, value in given.items():
        if value is not None:
            name(where, value, config.max_id_bytes)


def name(where: str, value: str, max_bytes: int) -> str:
    """A text that must say something: not blank, not too long."""
    if type(value) is str and len(value) <= max_bytes and value.isascii() and value.isprintable() and value.strip():
        return value  # what nearly all names are; the rest of this finds out about the others
    size = len(text(where, value))
    if not value or value.isspace():
        raise InvalidInput(where, "must not be blank")
    if size > max_bytes:
        raise InvalidInput(where, f"{size} bytes, the limit is {max_bytes}")
    return value


def text(where: str, value: str) -> bytes:
    """A text that every database and JSON can hold; gives its UTF-8 form."""
    if type(value) is not str:
        raise InvalidInput(where, f"must be a plain str, not {type(value).__name__}")
    try:
        raw = value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(where, "is not valid Unicode text (it holds half of a surrogate pair)") from None
    if 0 in raw:
        raise InvalidInput(where, "must not contain null bytes")
    return raw


def at_most(where: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidInput(where, f"{count} given, the limit is {limit}; split the call")


def seconds(where: str, value: float) -> int:
    """A duration in seconds, as microseconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(where, f"must be a number of seconds, not {type(value).__name__}")
    if value < 0 or value > _MAX_SECONDS or math.isnan(value):
        raise InvalidInput(where, f"must be from 0 to {_MAX_SECONDS} seconds (got {value!r})")
    return round(value * 1_000_000)


def count(where: str, value: int, limit: int) -> int:
    """A number of things asked for: at least one."""
    if not _is_int(value) or not 1 <= value <= limit:
        raise InvalidInput(where, f"must be a whole number from 1 to {limit} (got {value!r})")
    return value


def tokens(given: LeaseToken | Lease | Iterable[LeaseToken | Lease], config: QueueConfig) -> list[LeaseToken]:
    """One token or many, as a list. A lease stands for its token."""
    listed = _listed("tokens", given, LeaseToken | Lease)
    at_most("tokens", len(listed), config.max_batch)
    return [
        each if type(each) is LeaseToken and _is_sound(each) else _token(f"tokens[{index}]", each)
        for index, each in enumerate(listed)
    ]


def _is_sound(token: LeaseToken) -> bool:
    return (
        type(token.sequence_id) is type(token.attempt) is type(token.fence) is int
        and type(token.lease_id) is str
        and 0 <= token.sequence_id < 2**63
        and 0 <= token.attempt < 2**63
        and 0 <= token.fence < 2**63
    )


def _token(where: str, given: Any) -> LeaseToken:
    token: LeaseToken = given.token if isinstance(given, Lease) else given
    if not isinstance(token, LeaseToken):
        raise InvalidInput(where, f"must be a LeaseToken, not {type(token).__name__}")
    if not _is_sound(token):
        raise InvalidInput(where, f"must hold whole numbers, 0 or more, and a text as its lease id (got {token!r})")
    return token


def ids(where: str, given: int | PendingItem | Iterable[int | PendingItem], config: QueueConfig) -> list[int]:
    """Sequence ids, sorted and without repeats. A pending item stands for its id."""
    many = _listed(where, given, int | PendingItem)
    at_most(where, len(many), config.max_batch)
    listed = [each.sequence_id if isinstance(each, PendingItem) else each for each in many]
    for each in listed:
        if not _is_int(each) or not 1 <= each < 2**63:
            raise InvalidInput(where, f"must hold sequence ids, whole numbers above 0 (got {each!r})")
    return sorted(set(listed))


def results(result: Any, number: int, config: QueueConfig) -> Sequence[bytes | None]:
    """The result for each of ``number`` tokens, as JSON. A list means one each; anything else is for all."""
    if isinstance(result, list):
        if len(result) != number:
            raise InvalidInput("result", f"{len(result)} results for {number} tokens; give one each, or one for all")
        return [_result(f"result[{index}]", each, config) for index, each in enumerate(result)]
    return [_result("result", result, config)] * number


def _result(where: str, result: Any, config: QueueConfig) -> bytes | None:
    if result is None:
        return None
    try:
        raw = msgspec.json.encode(result)
        msgspec.json.decode(raw)
        if b"null" in raw:
            refuse_infinite(result)
    except (TypeError, ValueError, UnicodeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidInput(where, f"cannot be written as JSON: {error}") from None
    if len(raw) > config.max_result_bytes:
        raise InvalidInput(
            where,
            f"{len(raw)} bytes of JSON, the limit is {config.max_result_bytes}; store it elsewhere, give its address",
        )
    return raw


def refuse_infinite(value: Any) -> None:
    """Raise ``ValueError`` for a NaN anywhere in it. JSON has none: it would come back as null, without a word."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        return
    for each in value:
        refuse_infinite(each)


def _moment(where: str, value: datetime) -> None:
    if not isinstance(value, datetime):
        raise InvalidInput(where, f"must be a datetime, not {type(value).__name__}")
    if value.tzinfo is None:
        raise InvalidInput(where, "must have a time zone; for UTC use datetime.now(UTC) or replace(tzinfo=UTC)")
    try:
        year = value.astimezone(UTC).year
    except OverflowError:
        year = 0
    if year not in _YEARS:
        raise InvalidInput(where, f"must be in the years {_YEARS.start} to {_YEARS.stop - 1}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
