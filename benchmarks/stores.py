"""Fresh databases to measure in: every cell of the table starts from an empty one, at full durability."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy import make_url

from benchmarks.contenders.contract import Contender
from tests.servers.postgres import PostgresEndpoint, PostgresServer

POSTGRES_URL = "OMNIRELAY_TEST_POSTGRES_URL"


def rest() -> None:
    """Let the disk come to rest, which otherwise is busy for a while yet with what the last one wrote."""
    os.sync()
    time.sleep(0.2)


def empty(folder: Path) -> None:
    """Give back what all files below a folder hold, and leave the files.

    ext4 passes over the places of files that were deleted within the last minutes, one after the other, whenever a file
    is made: after some rounds that would take longer than what is measured.
    """
    for file in folder.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)


class StoreOfDatabases(Protocol):
    def fresh(self, contender: type[Contender]) -> str:
        """A new database that the contender has prepared."""

    def discard(self, target: str) -> None: ...


class SqliteFiles:
    """Each contender prepares its schema once; every fresh file is a copy of that."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()

    def fresh(self, contender: type[Contender]) -> str:
        template = self._directory / f"template-{contender.name}"
        if not template.exists():
            template.mkdir()
            contender.prepare(str(template / "queue.db"))
        home = self._directory / f"run-{next(self._numbers)}"
        shutil.copytree(template, home)
        return str(home / "queue.db")

    def discard(self, target: str) -> None:
        shutil.rmtree(Path(target).parent, ignore_errors=True)


class PostgresDatabases:
    """Each contender prepares its schema once; every fresh database is a copy of that."""

    def __init__(self, endpoint: PostgresEndpoint) -> None:
        self._endpoint = endpoint
        self._templates: dict[str, str] = {}
        self._numbers = itertools.count()
        self.version = self._setting("server_version")
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            if self._setting(name) != "on":
                raise RuntimeError(f"PostgreSQL runs with {name} = {self._setting(name)}: not the same durability")

    def fresh(self, contender: type[Contender]) -> str:
        if contender.name not in self._templates:
            template = self._name("template")
            contender.prepare(plain(self._endpoint.create_database(template)))
            self._templates[contender.name] = template
        return plain(self._endpoint.create_database(self._name("run"), self._templates[contender.name]))

    def discard(self, target: str) -> None:
        self._endpoint.drop_database(make_url(target).database or "")

    def close(self) -> None:
        for template in self._templates.values():
            self._endpoint.drop_database(template)

    def _name(self, kind: str) -> str:
        return f"bench_{kind}_{os.getpid()}_{next(self._numbers)}"

    def _setting(self, name: str) -> str:
        with self._endpoint.connect() as connection:
            return str(connection.execute(f"show {name}".encode()).fetchone()[0])  # type: ignore[index]


@contextmanager
def postgres(directory: Path) -> Iterator[PostgresDatabases]:
    """A server of our own, or the one that the environment names."""
    if url := os.environ.get(POSTGRES_URL):
        databases = PostgresDatabases(PostgresEndpoint(url))
        yield databases
        databases.close()
    else:
        with PostgresServer(directory) as server:
            yield PostgresDatabases(server)


def plain(url: str) -> str:
    """The URL as every PostgreSQL driver takes it, without SQLAlchemy's choice of one."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def sync_microseconds(directory: Path, samples: int = 200) -> float:
    """The median cost of forcing 4 KiB to disk here: what bounds every durable commit of one item."""
    times = []
    path = directory / "sync-probe"
    with path.open("wb", buffering=0) as probe:
        for _ in range(samples):
            probe.write(bytes(4096))
            started = time.perf_counter()
            os.fsync(probe.fileno())
            times.append(time.perf_counter() - started)
    path.unlink()
    return sorted(times)[samples // 2] * 1e6
