"""The parametrised database, a fake clock, and queues that are closed after the test."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from lease_core import LeaseQueue, QueueConfig
from tests.conformance.backends import Backend, Postgres, SqliteFile, SqliteMemory
from tests.conformance.clock import FakeClock
from tests.servers.postgres import PostgresEndpoint


class OpenQueue(Protocol):
    def __call__(self, namespace: str = "main", *, clock: Any = ..., **config: Any) -> LeaseQueue: ...


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: PostgresEndpoint) -> Iterator[str]:
    """One database for all cases: each has namespaces of its own."""
    name = f"conformance_{uuid.uuid4().hex[:12]}"
    url = postgres_server.create_database(name)
    LeaseQueue.migrate(url)
    yield url
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the schema in it, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    LeaseQueue.migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite-file", "sqlite-memory", "postgres"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    match request.param:
        case "sqlite-file":
            template = request.getfixturevalue("migrated_file")
            return SqliteFile(Path(shutil.copy(template, tmp_path / "queue.db")))
        case "sqlite-memory":
            return SqliteMemory()
        case _:
            return Postgres(request.getfixturevalue("migrated_postgres"))


@pytest.fixture
def shared_backend(backend: Backend) -> Backend:
    if not backend.shared:
        pytest.skip("capability: a database in memory cannot be reached from a second connection")
    return backend


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def open_queue(backend: Backend, clock: FakeClock) -> Iterator[OpenQueue]:
    """Opens queues on the database under test, by a short name that no other test shares, on the fake clock.

    In memory every opening is a database of its own, so the same name twice needs ``shared_backend``.
    """
    opened: list[LeaseQueue] = []
    suffix = uuid.uuid4().hex[:8]

    def open_(namespace: str = "main", *, clock: Any = clock, **config: Any) -> LeaseQueue:
        full = f"{namespace}-{suffix}"
        if not backend.shared and full in {queue.namespace for queue in opened}:
            pytest.skip("capability: a database in memory cannot be opened twice")
        opened.append(backend.open(full, QueueConfig(**config), clock))
        return opened[-1]

    yield open_
    for queue in opened:
        queue.close()


@pytest.fixture
def queue(open_queue: OpenQueue) -> LeaseQueue:
    """A queue with the default rules."""
    return open_queue()
