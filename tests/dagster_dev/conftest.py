"""One `dagster dev` at a time, shared by the tests of this folder: first on SQLite, then on PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import make_url

from tests.dagster_dev.fabric import MODULES, Fabric
from tests.servers.postgres import PostgresEndpoint


@pytest.fixture(scope="package")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Fabric]]:
    """Gives the running instance on a kind of database. It is started when it is first asked for, and stopped when
    another kind is asked for; so tests of the same kind share it, whatever else they are parametrized by."""
    now: dict[str, Fabric] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Fabric:
            if kind not in now:
                stack.close()
                now.clear()
                home = tmp_path_factory.mktemp(kind.partition(",")[0])
                if kind == "sqlite":
                    wanted = Fabric(home, f"sqlite:///{home}/queues.db")
                else:
                    server = request.getfixturevalue("postgres_server")
                    modules = MODULES[:1] if kind == "postgres, one location" else MODULES
                    wanted = Fabric(home, *_databases(server, stack), modules)
                now[kind] = stack.enter_context(wanted)
            return now[kind]

        yield get


def _databases(server: PostgresEndpoint, stack: ExitStack) -> tuple[str, dict[str, Any]]:
    """The address of a database for the queues, and settings that put Dagster's own storage into another."""
    urls = []
    for what in ("queues", "dagster"):
        name = f"{what}_{uuid.uuid4().hex[:12]}"
        urls.append(make_url(server.create_database(name)))
        stack.callback(server.drop_database, name)
    queues, dagster = urls
    address = dagster.set(drivername="postgresql+psycopg2").render_as_string(hide_password=False)
    return queues.render_as_string(hide_password=False), {"postgres": {"postgres_url": address}}


@pytest.fixture(scope="package", params=["sqlite", "postgres"])
def fabric(request: pytest.FixtureRequest, running: Callable[[str], Fabric]) -> Fabric:
    """The code locations under a running instance, on each kind of database unless a test says otherwise: ``sqlite``,
    ``postgres``, or ``postgres, one location``, which starts and runs with fewer processes."""
    return running(request.param)
