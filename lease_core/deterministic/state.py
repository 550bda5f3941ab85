"""Small durable state under a key: get, put, add if absent. What versions and effects are kept in.

Every store promises the same: ``add`` has one winner among any number of processes; what a call has written is there
after a crash as far as the store keeps its word; a reader sees a whole value or none. A ``fence`` is checked in the
same atomic step as the write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from lease_core import limits
from lease_core.deterministic.errors import RecordUnreadable, StaleFence
from lease_core.errors import InvalidInput
from lease_core.model import LeaseToken

MAX_KEY_BYTES = 1_024
MAX_VALUE_BYTES = 4 * 1024 * 1024

_FORMS = "sqlite:///path, postgresql://user@host/db, file:///folder or redis://host:6379/0"


class Fence(NamedTuple):
    """A lease's right to write. ``scope`` is what its fence number is compared within: the item, of one queue."""

    scope: str
    token: LeaseToken

    @property
    def number(self) -> int:
        return self.token.fence

    def refusal(self, seen: int) -> StaleFence:
        return StaleFence(
            f"item {self.token.sequence_id}: fence {self.number} is older than {seen}, which was seen here already: "
            "another holder has the item now. Nothing was written; stop"
        )


class Added(NamedTuple):
    """The value now under the key, and whether it is the one given."""

    value: Any
    added: bool


class StateStore(ABC):
    """JSON values under text keys, shared between processes. Open one with ``StateStore.open``.

    A store is a context manager and safe to share between threads. Keys are up to 1 KiB, values up to 4 MiB of JSON;
    ``None`` stands for absence and cannot be stored.
    """

    joined = False
    """Whether writes are part of the caller's own transaction, and last only if that is committed."""

    checks_tokens = False
    """Whether a fence is held against the queue's present state rather than against the fences seen here."""

    @staticmethod
    def open(url: str, *, timeout: float = 10.0) -> StateStore:
        """The store that ``url`` names, made if it is new.

        ``sqlite:///path`` and ``postgresql://…`` use two tables of their own, ``file:///folder`` (or
        ``file:relative/folder``) a file per key, ``redis://…`` a Redis or Valkey server. ``timeout`` is for how many
        seconds a call waits for others or for the server.
        """
        if not isinstance(url, str):
            raise InvalidInput("url", f"must be a text such as {_FORMS}, not {type(url).__name__}")
        scheme = url.partition(":")[0].partition("+")[0]
        if scheme in ("sqlite", "postgresql", "postgres"):
            from lease_core.deterministic.sql_state import SqlStateStore

            return SqlStateStore(url, timeout)
        if scheme in ("redis", "rediss", "unix"):
            from lease_core.deterministic.redis_state import RedisStateStore

            return RedisStateStore(url, timeout)
        if scheme == "file":
            from lease_core.deterministic.file_state import FileStateStore

            return FileStateStore(_folder(url), timeout)
        raise InvalidInput("url", f"names no store that can hold state; use {_FORMS}")

    def get(self, key: str) -> Any:
        """The value under ``key``, or None."""
        raw = self._read(_key(key))
        return None if raw is None else _decoded(key, raw)

    def put(self, key: str, value: Any, *, fence: Fence | None = None) -> None:
        """Set the value under ``key``, whatever was there."""
        self._write(_key(key), encoded("value", value), fence)

    def add(self, key: str, value: Any, *, fence: Fence | None = None) -> Added:
        """Set the value under ``key`` unless there is one. Of any number who try, exactly one is told ``added``.

        After a ``StoreUnavailable`` the value may or may not be there: add it again and look at what comes back.
        """
        raw = encoded("value", value)
        there, added = self._insert(_key(key), raw, fence)
        return Added(_decoded(key, there), added)

    def claim(self, fence: Fence) -> None:
        """From now on refuse every fence in this scope that is older; raises ``StaleFence`` if this one is."""
        self._claim(fence)

    def remove(self, key: str) -> bool:
        """Forget ``key``. Gives whether there was a value."""
        return self._delete(_key(key))

    def close(self) -> None:  # noqa: B027 - a store without connections has nothing to do
        """Let go of connections."""

    def __enter__(self) -> StateStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    # What each store does. Keys are checked and values are JSON by now; a fence that is refused raises StaleFence.

    @abstractmethod
    def _read(self, key: str) -> bytes | None: ...

    @abstractmethod
    def _write(self, key: str, raw: bytes, fence: Fence | None) -> None: ...

    @abstractmethod
    def _insert(self, key: str, raw: bytes, fence: Fence | None) -> tuple[bytes, bool]: ...

    @abstractmethod
    def _claim(self, fence: Fence) -> None: ...

    @abstractmethod
    def _delete(self, key: str) -> bool: ...


def encoded(where: str, value: Any) -> bytes:
    """A value as JSON that reads back as it was written, but for tuples (lists) and keys (text)."""
    if value is None:
        raise InvalidInput(where, "must not be None, which stands for absence")
    try:
        raw = msgspec.json.encode(value)
        msgspec.json.decode(raw)
        limits.refuse_infinite(value)
    except (TypeError, ValueError, UnicodeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidInput(where, f"cannot be written as JSON: {error}") from None
    if len(raw) > MAX_VALUE_BYTES:
        raise InvalidInput(where, f"{len(raw)} bytes of JSON, the limit is {MAX_VALUE_BYTES}; store it elsewhere")
    return raw


def _decoded(key: str, raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise RecordUnreadable(
            f"what is stored under {key!r} is not JSON ({error}): somebody else wrote it; remove it, or use another key"
        ) from error


def _key(key: str) -> str:
    return limits.name("key", key, MAX_KEY_BYTES)


def _folder(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise InvalidInput("url", "must be file:///absolute/folder or file:relative/folder")
    return unquote(parts.path)
