"""Hubs on both kinds of database, in this process or in one of their own that can be killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lease_core.replication import HubServer
from tests.replication_hub.hub_process import HubProcess


@pytest.fixture(params=["sqlite", "postgresql"])
def hub_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/hub.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def hub(hub_url: str) -> Iterator[HubServer]:
    with HubServer(hub_url, "127.0.0.1:0") as server:
        yield server


@pytest.fixture
def address(hub: HubServer) -> str:
    return f"127.0.0.1:{hub.port}"


@pytest.fixture
def sqlite_hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0") as server:
        yield server


@pytest.fixture
def hub_process(hub_url: str, tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(hub_url, tmp_path / "hub.log") as process:
        yield process
