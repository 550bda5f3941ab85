"""A committer in a process of its own, which can be told to kill itself at any of its steps."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog

from omnirelay_dagster.iceberg.catalog import _address, location, open_catalog
from tests.iceberg.lake import ASSET, Lake

# a server that has all imported, and never any threads: its children begin at once, and clean
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload([__name__, "pyiceberg.io.pyarrow", "pyarrow.parquet", "sqlalchemy.dialects.sqlite"])


class SteppingCatalog(SqlCatalog):
    """The catalog, which tells of the steps that a commit takes inside of it."""

    step: Callable[[str], None] = staticmethod(lambda name: None)

    def commit_table(self, *args: Any, **kwargs: Any) -> Any:
        response = super().commit_table(*args, **kwargs)
        self.step("swapped")
        return response

    def _write_metadata(self, *args: Any, **kwargs: Any) -> None:
        super()._write_metadata(*args, **kwargs)
        self.step("metadata written")


def stepping_catalog(lake: Lake, step: Callable[[str], None]) -> SteppingCatalog:
    open_catalog(lake.catalog_url, lake.home / "lake").close()  # which makes its tables, whoever else is at it
    uri = _address(lake.catalog_url).render_as_string(hide_password=False)
    catalog = SteppingCatalog("default", uri=uri, warehouse=location(lake.home / "lake"))
    catalog.step = step  # type: ignore[method-assign]
    return catalog


def commit(home: Path, catalog_url: str, die_at: str | None, occurrence: int, batches_per_commit: int) -> None:
    """Commit what is published; at that occurrence of that step, SIGKILL comes."""
    left = occurrence

    def step(name: str) -> None:
        nonlocal left
        left -= name == die_at
        if not left and name == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    lake = Lake(home, catalog_url)
    table = lake.table(stepping_catalog(lake, step))
    table.commit_published(lake.fenced, ASSET, batches_per_commit=batches_per_commit, step=step)
    lake.close()


def start(lake: Lake, die_at: str | None = None, occurrence: int = 1, batches_per_commit: int = 2) -> BaseProcess:
    arguments = (lake.home, lake.catalog_url, die_at, occurrence, batches_per_commit)
    process = processes.Process(target=commit, args=arguments)
    process.start()
    return process
