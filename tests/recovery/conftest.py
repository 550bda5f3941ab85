"""Places for an original and its copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from tests.conformance.clock import FakeClock
from tests.recovery.histories import config, live


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database for the copy."""
    return f"sqlite:///{tmp_path}/copy.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/copy.db"


@pytest.fixture
def original(tmp_path: Path, clock: FakeClock) -> Iterator[LeaseQueue]:
    """A queue with a past."""
    with LeaseQueue.open(f"sqlite:///{tmp_path}/original.db", "main", config(), clock=clock) as queue:
        live(queue, clock, seed=7)
        yield queue
