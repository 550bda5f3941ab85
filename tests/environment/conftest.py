"""The databases these tests run on, and the things that go wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from lease_core import LeaseQueue
from tests.environment.proxy import Proxy
from tests.servers.postgres import PostgresServer


@pytest.fixture(params=["sqlite", "postgres"])
def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with nothing in it."""
    return f"sqlite:///{tmp_path}/queue.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def url(bare_url: str) -> str:
    """A database with the queue's schema."""
    LeaseQueue.migrate(bare_url)
    return bare_url


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    return tmp_path / "queue.db"


@pytest.fixture
def migrated_postgres_url(postgres_url: str) -> str:
    LeaseQueue.migrate(postgres_url)
    return postgres_url


@pytest.fixture(scope="package")
def own_server(postgres_server: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server that may be stopped. Where none can be started ``postgres_server`` has said so already."""
    with PostgresServer(tmp_path_factory.mktemp("postgres") / "server") as server:
        yield server


@pytest.fixture
def restartable_url(own_server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database on a server that the test may restart."""
    name = f"test_{abs(hash(request.node.nodeid))}"
    url = own_server.create_database(name)
    LeaseQueue.migrate(url)
    yield url
    own_server.drop_database(name)


@pytest.fixture
def proxy(migrated_postgres_url: str) -> Iterator[Proxy]:
    """A line to the database that can be cut."""
    target = sa.make_url(migrated_postgres_url)
    with Proxy(str(target.host), target.port or 5432) as proxy:
        proxy.url = target.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        yield proxy
