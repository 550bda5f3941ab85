"""One local Spark for the whole session, and queues with a history."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, QueueConfig
from tests.conformance.clock import FakeClock

os.environ["PYSPARK_PYTHON"] = sys.executable
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A small session. Its workers find this checkout first, wherever the tests were started from."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    from pyspark.sql import SparkSession

    from omnirelay_dagster.spark.log_source import register

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "Pacific/Auckland")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.driver.memory", "1g")
        # little data, many plans: compiling each of them would take longer than running it
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .getOrCreate()
    )
    register(session, pushdown=True)
    yield session
    session.stop()


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
