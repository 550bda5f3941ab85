"""The demo fabric in a folder of its own, on one small Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from definitions.fabric import SPARK
from tests.conftest import settings
from tests.fabric.driving import Driver


@pytest.fixture(scope="module", autouse=True)
def spark(local_spark: SparkSession) -> Iterator[SparkSession]:
    """The session that the fabric's runs find in this process, with what the fabric says about SQL."""
    with settings(local_spark, {key: SPARK[key] for key in SPARK if key.startswith("spark.sql.")}) as session:
        yield session


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with dg.instance_for_test() as instance:
        driver = Driver(tmp_path, instance)
        yield driver
        driver.close()
