"""Spark in a zone with summer time, and a queue with a fenced IO manager for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from tests.conftest import settings


@pytest.fixture(scope="module")
def spark(local_spark: SparkSession) -> Iterator[SparkSession]:
    with settings(local_spark, {"spark.sql.session.timeZone": "Europe/Berlin"}) as session:
        yield session


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[LeaseQueueResource]:
    url = f"sqlite:///{tmp_path}/fabric.db"
    resource = LeaseQueueResource(url=url, namespace="landing", retry_delay=0.0, lease_duration=600.0)
    yield resource
    resource.get_queue().close()


@pytest.fixture
def fenced(tmp_path: Path, landing: LeaseQueueResource) -> FencedIOManager:
    return FencedIOManager(base_path=str(tmp_path / "out"), queue=landing)
