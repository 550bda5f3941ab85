"""One small local Spark session for all tests here, and a queue with a fenced IO manager for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnirelay_dagster.doctor import prepare_environment
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource

SMALL = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "512m",
    "spark.sql.session.timeZone": "Europe/Berlin",
    "spark.log.level": "ERROR",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    prepare_environment()
    builder = SparkSession.builder.master("local[2]")
    for key, value in SMALL.items():
        builder = builder.config(key, value)
    session = builder.config("spark.local.dir", str(tmp_path_factory.mktemp("spark"))).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[LeaseQueueResource]:
    url = f"sqlite:///{tmp_path}/fabric.db"
    resource = LeaseQueueResource(url=url, namespace="landing", retry_delay=0.0, lease_duration=600.0)
    yield resource
    resource.get_queue().close()


@pytest.fixture
def fenced(tmp_path: Path, landing: LeaseQueueResource) -> FencedIOManager:
    return FencedIOManager(base_path=str(tmp_path / "out"), queue=landing)
