"""A queue, and a fenced IO manager on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource


@pytest.fixture
def landing(tmp_path: Path) -> Iterator[LeaseQueueResource]:
    resource = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", retry_delay=0.0)
    yield resource
    resource.get_queue().close()


@pytest.fixture
def fenced(tmp_path: Path, landing: LeaseQueueResource) -> FencedIOManager:
    return FencedIOManager(base_path=str(tmp_path / "out"), queue=landing)
