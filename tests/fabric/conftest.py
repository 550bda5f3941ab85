"""The demo fabric in a folder of its own, on one small Spark session for each module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from definitions.fabric import SPARK
from omnirelay_dagster.doctor import prepare_environment
from tests.fabric.driving import Driver


@pytest.fixture(scope="module", autouse=True)
def spark() -> Iterator[SparkSession]:
    """The session that the fabric's runs find in this process; one that others started is left to them."""
    prepare_environment()
    before = SparkSession.getActiveSession()
    builder = SparkSession.builder
    for key, value in SPARK.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate() if before is None else before
    yield session
    if before is None:
        session.stop()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    with dg.instance_for_test() as instance:
        driver = Driver(tmp_path, instance)
        yield driver
        driver.close()
