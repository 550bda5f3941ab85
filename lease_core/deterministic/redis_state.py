"""State in Redis or Valkey. A write and the check of its fence are one script, so the server does both or neither.

What a crash of the server keeps is up to its settings: ``appendonly yes`` with ``appendfsync always`` keeps all that
was acknowledged. A fenced write touches two keys, which a cluster may hold on two servers: use one server, or a primary
with replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lease_core.deterministic.state import Fence, StateStore
from lease_core.errors import InvalidInput, StoreError, StoreFull, StoreReadOnly, StoreUnavailable

_VALUES = "omnirelay:state:"
_FENCES = "omnirelay:fence:"

# KEYS: fence, key (or none). ARGV: fence number, value, "put" or "add" or "claim".
# Gives {refused, the fence seen}, {not added, the value there} or {written, the value}.
_FENCED = """
local seen = redis.call('GET', KEYS[1])
if seen and tonumber(seen) > tonumber(ARGV[1]) then return {0, seen} end
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[3] == 'claim' then return {2, ''} end
if ARGV[3] == 'put' then redis.call('SET', KEYS[2], ARGV[2]) return {2, ARGV[2]} end
if redis.call('SET', KEYS[2], ARGV[2], 'NX') then return {2, ARGV[2]} end
return {1, redis.call('GET', KEYS[2])}
"""


class RedisStateStore(StateStore):
    """For many machines that share a server."""

    def __init__(self, url: str, timeout: float = 10.0) -> None:
        try:
            import redis
        except ImportError as error:
            raise StoreUnavailable(
                f"url: Redis needs its client ({error}); pip install 'omnirelay-dagster[redis]'"
            ) from (error)
        self._errors = redis.exceptions
        try:
            self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        except (ValueError, TypeError):
            raise InvalidInput("url", "is not a Redis URL; use redis://host:6379/0") from None
        self._fenced: Any = self._client.register_script(_FENCED)
        try:
            with self._translated():
                self._client.ping()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        settings = self._client.connection_pool.connection_kwargs
        where = settings.get("path") or f"{settings.get('host')}:{settings.get('port')}"
        return f"RedisStateStore({where}, db={settings.get('db', 0)})"

    def _read(self, key: str) -> bytes | None:
        with self._translated():
            found: bytes | None = self._client.get(_VALUES + key)
            return found

    def _write(self, key: str, raw: bytes, fence: Fence | None) -> None:
        if fence is not None:
            self._run(fence, key, raw, "put")
            return
        with self._translated():
            self._client.set(_VALUES + key, raw)

    def _insert(self, key: str, raw: bytes, fence: Fence | None) -> tuple[bytes, bool]:
        if fence is not None:
            return self._run(fence, key, raw, "add")
        while True:
            with self._translated():
                if self._client.set(_VALUES + key, raw, nx=True):
                    return raw, True
            there = self._read(key)
            if there is not None:  # else it was removed since; add again
                return there, False

    def _claim(self, fence: Fence) -> None:
        self._run(fence, None, b"", "claim")

    def _run(self, fence: Fence, key: str | None, raw: bytes, act: str) -> tuple[bytes, bool]:
        keys = [_FENCES + fence.scope] + ([] if key is None else [_VALUES + key])
        with self._translated():
            outcome, value = self._fenced(keys=keys, args=[fence.number, raw, act])
        if outcome == 0:
            raise fence.refusal(int(value))
        return value, outcome == 2

    def _delete(self, key: str) -> bool:
        with self._translated():
            return bool(self._client.delete(_VALUES + key))

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        errors = self._errors
        try:
            yield
        except (errors.ConnectionError, errors.TimeoutError) as error:
            raise StoreUnavailable(f"the Redis server cannot be reached ({error}); repeat the call") from error
        except errors.ReadOnlyError as error:
            raise StoreReadOnly(f"the Redis server takes no writes ({error}): connect to the primary") from error
        except errors.OutOfMemoryError as error:
            raise StoreFull(f"the Redis server is full ({error}). Nothing was written") from error
        except errors.RedisError as error:
            raise StoreError(f"the Redis server refused a command: {error}") from error
