"""Spark far from UTC, and queues with a history."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, QueueConfig
from tests.conformance.clock import FakeClock
from tests.conftest import settings


@pytest.fixture(scope="module")
def spark(local_spark: Any) -> Iterator[Any]:
    from omnirelay_dagster.spark.log_source import register

    with settings(local_spark, {"spark.sql.session.timeZone": "Pacific/Auckland"}) as session:
        register(session, pushdown=True)
        yield session


Open = Callable[..., LeaseQueue]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        postgres: str = request.getfixturevalue("postgres_url")
        LeaseQueue.migrate(postgres)
        return postgres
    return f"sqlite:///{tmp_path / 'queue.db'}"


@pytest.fixture
def open_queue(url: str, clock: FakeClock) -> Iterator[Open]:
    opened: list[LeaseQueue] = []

    def open_(namespace: str | None = None, **config: Any) -> LeaseQueue:
        name = namespace or f"ns-{uuid.uuid4().hex[:8]}"
        opened.append(LeaseQueue.open(url, name, QueueConfig(**config), clock=clock))
        return opened[-1]

    yield open_
    for queue in opened:
        queue.close()
