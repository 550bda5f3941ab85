"""Fixtures that every test may use: a real PostgreSQL, a fresh database on it, and a local Spark."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.company import CompanyScheduling, arrange
from tests.servers.postgres import PostgresEndpoint, PostgresServer, PostgresUnavailable
from tests.servers.spark_home import JAVA_OPTIONS, spark_home

ROOT = Path(__file__).parent.parent
SPARK_WORKERS = Path(__file__).parent / "servers" / "spark_workers"
_WHY_NO_POSTGRES = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Iterator[PostgresEndpoint]:
    """The server named by OMNIRELAY_TEST_POSTGRES_URL, or one of our own for the whole session."""
    if url := os.environ.get("OMNIRELAY_TEST_POSTGRES_URL"):
        yield PostgresEndpoint(url)
        return
    with tempfile.TemporaryDirectory(prefix="omnirelay-postgres-", ignore_cleanup_errors=True) as directory:
        server = PostgresServer(Path(directory))
        try:
            server.start()
        except (PostgresUnavailable, ImportError) as error:
            if os.environ.get("CI") == "true":
                pytest.fail(f"PostgreSQL must be tested in CI, but cannot be started: {error}")
            request.config.stash[_WHY_NO_POSTGRES] = str(error)
            pytest.skip("PostgreSQL cannot be started here")
        yield server
        server.stop()


@pytest.fixture
def postgres_url(postgres_server: PostgresEndpoint) -> Iterator[str]:
    """The URL of an empty database that is dropped after the test, whoever is still connected to it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres_server.create_database(name)
    postgres_server.drop_database(name)


os.environ.setdefault("JDK_JAVA_OPTIONS", JAVA_OPTIONS)

# little data, many plans: compiling each of them would take longer than running it
WITHOUT_COMPILING = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}
SPARK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.log.level": "ERROR",
    **WITHOUT_COMPILING,
}


@pytest.fixture(scope="session")
def local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One small Spark for all tests of this process. Its workers find this checkout first, wherever tests started."""
    from pyspark.sql import SparkSession

    from omnirelay_dagster.doctor import prepare_environment

    prepare_environment()
    builder = SparkSession.builder.master("local[2]")
    for key, value in SPARK.items():
        builder = builder.config(key, value)
    for key in ("spark.local.dir", "spark.sql.warehouse.dir"):
        builder = builder.config(key, str(tmp_path_factory.mktemp("spark")))
    with pytest.MonkeyPatch.context() as patch:
        for folder in (ROOT, SPARK_WORKERS):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("SPARK_HOME", str(spark_home()))
        session = builder.getOrCreate()
    yield session
    session.stop()


@contextmanager
def settings(session: Any, wanted: Mapping[str, str]) -> Iterator[Any]:
    """The session with settings of SQL that are as they were afterwards: others use it too."""
    before = {key: session.conf.get(key, None) for key in wanted}
    for key, value in wanted.items():
        session.conf.set(key, value)
    try:
        yield session
    finally:
        for key, value in before.items():
            session.conf.unset(key) if value is None else session.conf.set(key, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    arrange(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> CompanyScheduling:
    config.option.loadscopereorder = False  # the order is arranged
    return CompanyScheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of a parallel run tells the one that writes the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["why_no_postgres"] = session.config.stash.get(_WHY_NO_POSTGRES, None)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if cause := getattr(node, "workeroutput", {}).get("why_no_postgres"):
        node.config.stash[_WHY_NO_POSTGRES] = cause


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if cause := config.stash.get(_WHY_NO_POSTGRES, None):
        terminalreporter.section("WARNING: nothing was tested on PostgreSQL", sep="!", yellow=True, bold=True)
        terminalreporter.write_line(cause)
        terminalreporter.write_line("Set OMNIRELAY_TEST_POSTGRES_URL to use a server that is already running.")
