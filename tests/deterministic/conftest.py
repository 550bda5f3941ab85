"""Every kind of state store, on real servers, and a name that no other test uses."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.deterministic import EffectStore, StateStore
from lease_core.recording import QueueStateStore
from tests.servers.postgres import PostgresEndpoint
from tests.servers.valkey import valkey

SHARED = ["sqlite", "postgres", "files", "redis"]
"""Stores that several processes can open by a URL."""


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture(scope="session")
def deterministic_postgres(postgres_server: PostgresEndpoint) -> Iterator[str]:
    """One database for all tests here: each has keys and namespaces of its own."""
    name = f"deterministic_{uuid.uuid4().hex[:12]}"
    url = postgres_server.create_database(name)
    LeaseQueue.migrate(url)
    yield url
    postgres_server.drop_database(name)


def state_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    match kind:
        case "sqlite":
            return f"sqlite:///{folder / 'state.db'}"
        case "postgres":
            return str(request.getfixturevalue("deterministic_postgres"))
        case "files":
            return f"file://{folder / 'state'}"
        case "redis":
            return str(request.getfixturevalue("valkey_url"))
    return "sqlite://"


@pytest.fixture(params=SHARED)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a store that other processes can open, too."""
    return state_url(request.param, request, tmp_path)


@pytest.fixture(params=[*SHARED, "memory", "queue"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore]:
    """A store of every kind, among them the one in a queue's own database."""
    if request.param == "queue":
        with LeaseQueue.open("sqlite://") as queue:
            yield QueueStateStore(queue._store, queue._ns, queue.queue_id)
        return
    with StateStore.open(state_url(request.param, request, tmp_path)) as store:
        yield store


@pytest.fixture
def effects(store: StateStore) -> EffectStore:
    return EffectStore(store)


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"
