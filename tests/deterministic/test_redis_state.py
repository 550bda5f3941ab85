"""A Redis server that is killed: what was acknowledged is there when it is back, and callers are told meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from lease_core import LeaseToken
from lease_core.deterministic import EffectStore, Fence, StaleFence, StateStore
from lease_core.errors import StoreError, StoreUnavailable
from tests.servers.valkey import valkey


def fence(number: int) -> Fence:
    return Fence("item", LeaseToken(1, 1, "lease", number))


def test_what_was_acknowledged_outlives_the_server(tmp_path: Path) -> None:
    with valkey(tmp_path) as url:  # which is ended by SIGKILL
        store = StateStore.open(url, timeout=2)
        effects = EffectStore(store)
        assert effects.run_once("charge/seq/1", lambda: "once") == "once"
        store.claim(fence(5))
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        effects.run_once("charge/seq/1", lambda: "again")
    with valkey(tmp_path, port=int(url.split(":")[2].split("/")[0])):
        assert effects.run_once("charge/seq/1", lambda: "again") == "once"
        with pytest.raises(StaleFence):
            store.add("key", 1, fence=fence(4))
        assert store.add("key", 1, fence=fence(5)).added
        store.close()


def test_a_key_that_is_no_text_is_an_error(valkey_url: str, name: str) -> None:
    import redis

    with StateStore.open(valkey_url) as store, redis.Redis.from_url(valkey_url) as client:
        client.lpush(f"omnirelay:state:{name}", "somebody else's list")
        with pytest.raises(StoreError, match="WRONGTYPE"):
            store.get(name)
