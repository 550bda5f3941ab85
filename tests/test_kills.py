"""SIGKILL of real worker processes, at named and at random points, and of the database server itself.

``make test`` kills more than 200 of them; each test counts its own.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from lease_core import LeaseQueue, WorkItem
from lease_core.store import schema
from tests.kills import audit, cases, forks, journal, workers
from tests.kills.workers import POINTS, Death
from tests.servers.postgres import PostgresServer

STORM_KILLS = 64


@pytest.fixture(params=["sqlite", "postgres"])
def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with nothing in it."""
    return f"sqlite:///{tmp_path}/queue.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
def url(bare_url: str) -> str:
    LeaseQueue.migrate(bare_url)
    return bare_url


@pytest.mark.parametrize("name", cases.CASES)
def test_killed_at_a_named_point_an_operation_happened_whole_or_not_at_all(name: str, url: str) -> None:
    case = cases.CASES[name]
    for point in POINTS:
        with LeaseQueue.open(url, f"{name} {point}", cases.CONFIG) as queue:
            prepared = case.prepare(queue)
            before, head = audit.everything(queue), queue.stats().head
            process = forks.start(cases.do, url, queue.namespace, name, prepared, Death(point))
            process.join()
            assert process.exitcode == forks.KILLED
            happened = point == "after-commit"
            assert (audit.everything(queue) == before) is not happened
            assert _types(queue, head) == (case.events if happened else [])
            if case.repeatable:
                case.act(queue, prepared)
                assert _types(queue, head) == case.events


def _types(queue: LeaseQueue, after: int) -> list[str]:
    return [event.type for event in queue.events(after=after)]


def test_killed_at_random_nothing_acknowledged_is_lost_or_done_twice(url: str, tmp_path: Path) -> None:
    with workers.open_queue(url, "storm") as queue:
        killed = _storm(url, "storm", tmp_path, STORM_KILLS)
        assert killed >= STORM_KILLS
        calls = journal.calls(tmp_path)
        seen = audit.check_journals(audit.check_queue(queue), calls)
        print(f"{killed} kills, {queue.stats().head} events, {dict(seen)}")
        for operation in ("enqueue", "lease", "complete", "left no trace"):
            assert seen[operation] > 0, f"nobody lived to see one {operation}"
        audit.finish(queue)
        audit.check_journals(audit.check_queue(queue), calls)


def _storm(url: str, namespace: str, directory: Path, kills: int) -> int:
    """Keep six workers at it and kill them one by one: half of them kill themselves at a named point."""
    dice = random.Random(f"{url[:6]} {kills}")
    names = itertools.count()
    crowd: list[forks.ForkServerProcess] = []
    killed = 0
    try:
        while killed < kills:
            while len(crowd) < 6:
                n = next(names)
                death = Death(dice.choice(POINTS), dice.randint(1, 12)) if n % 4 < 2 else None
                role = workers.produce if n % 2 else workers.consume
                crowd.append(forks.start(role, url, namespace, directory, f"{role.__name__}-{n}", death))
            time.sleep(dice.uniform(0.01, 0.12))
            forks.kill(dice.choice(crowd))
            dead = [process for process in crowd if process.exitcode is not None]
            assert all(process.exitcode == forks.KILLED for process in dead), "a worker crashed by itself"
            killed += len(dead)
            crowd = [process for process in crowd if process.exitcode is None]
    finally:
        for process in crowd:
            forks.kill(process)
    return killed + len(crowd)


def test_killed_in_the_first_open_leaves_nothing_that_the_next_open_minds(bare_url: str) -> None:
    statements = _first_open(bare_url, die_at=None)
    assert statements > 10
    kills = 0
    for n in range(1, statements, max(1, statements // 6)):
        _empty(bare_url)
        process = forks.start(_first_open, bare_url, n)
        process.join()
        assert process.exitcode == forks.KILLED
        kills += 1
        with LeaseQueue.open(bare_url, auto_migrate=True) as queue:
            assert [receipt.sequence_id for receipt in queue.enqueue(WorkItem("file", "a"))] == [1]
    assert kills >= 6


def _first_open(url: str, die_at: int | None) -> int:
    """Open the queue, counting statements, and die at one of them."""
    count = 0

    def before(*_: object) -> None:
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "before_cursor_execute", before)
    try:
        LeaseQueue.open(url, auto_migrate=True).close()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", before)
    return count


def _empty(url: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for table in [*schema.metadata.tables, schema.VERSION_TABLE]:
            connection.execute(sa.text(f"DROP TABLE IF EXISTS {table}"))
    engine.dispose()


@pytest.fixture
def own_server(postgres_server: object, tmp_path: Path) -> Iterator[PostgresServer]:
    """A server that may be killed. Where none can be started ``postgres_server`` has said so already."""
    with PostgresServer(tmp_path / "server") as server:
        yield server


def test_the_server_killed_under_load_loses_nothing_acknowledged(own_server: PostgresServer, tmp_path: Path) -> None:
    url = own_server.create_database("queue")
    LeaseQueue.migrate(url)
    with workers.open_queue(url, "storm") as queue:
        roles = [workers.produce, workers.consume] * 2
        crowd = [forks.start(role, url, "storm", tmp_path, f"{role.__name__}-{n}") for n, role in enumerate(roles)]
        try:
            _await_all(tmp_path, len(roles))
            for _ in range(3):
                _await_progress(queue)
                own_server.kill()
                own_server.start()
            _await_progress(queue)
            (tmp_path / "stop").touch()
            for process in crowd:
                process.join(60)
                assert process.exitcode == 0, "a worker did not get over it"
        finally:
            for process in crowd:
                forks.kill(process)
        calls = journal.calls(tmp_path)
        seen = audit.check_journals(audit.check_queue(queue), calls)
        assert seen["enqueue"] > 0
        assert seen["complete"] > 0
        audit.finish(queue)
        audit.check_journals(audit.check_queue(queue), calls)


def _await_all(directory: Path, workers: int) -> None:
    """Wait until each of the workers is at work: to open a queue whose server is away is another story."""
    end = time.monotonic() + 60
    while sum(path.stat().st_size > 0 for path in directory.glob("*.journal")) < workers:
        assert time.monotonic() < end, "the workers did not begin"
        time.sleep(0.02)


def _await_progress(queue: LeaseQueue) -> None:
    """Wait until the workers are back at work: dozens of completions since the last look."""
    start = queue.stats().completed
    end = time.monotonic() + 60
    while queue.stats().completed < start + 50:
        assert time.monotonic() < end, "the workers did not go on"
        time.sleep(0.02)
