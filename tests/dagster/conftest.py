"""A Dagster instance, a queue, and a fenced IO manager on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource


@pytest.fixture(scope="module")
def shared_instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    """With one database for the events of all runs: one for each run takes longer to make than most runs here take."""
    events = {
        "module": "dagster.core.storage.event_log",
        "class": "ConsolidatedSqliteEventLogStorage",
        "config": {"base_dir": str(tmp_path_factory.mktemp("events"))},
    }
    with dg.instance_for_test(overrides={"event_log_storage": events}) as made:
        yield made


@pytest.fixture
def instance(shared_instance: dg.DagsterInstance) -> dg.DagsterInstance:
    """An instance without runs; making one for each test would take far longer than the tests do."""
    shared_instance.run_storage.wipe()
    return shared_instance


@pytest.fixture
def resource(tmp_path: Path) -> LeaseQueueResource:
    """A queue by its address only: nobody has opened it yet."""
    return LeaseQueueResource(url=f"sqlite:///{tmp_path / 'fabric.db'}", namespace="landing")


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[LeaseQueueResource]:
    resource = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", retry_delay=0.0)
    yield resource
    resource.get_queue().close()


@pytest.fixture
def fenced(tmp_path: Path, landing: LeaseQueueResource) -> FencedIOManager:
    return FencedIOManager(base_path=str(tmp_path / "out"), queue=landing)
