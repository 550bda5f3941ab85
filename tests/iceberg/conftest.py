from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.iceberg.lake import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    lake = Lake(tmp_path)
    yield lake
    lake.close()
