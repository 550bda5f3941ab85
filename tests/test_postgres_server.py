"""The launcher keeps what it promises: a crash is a real crash, and nothing committed is lost in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from tests.servers.postgres import PostgresEndpoint, PostgresServer


@pytest.fixture
def own_server(postgres_server: PostgresEndpoint) -> Iterator[PostgresServer]:
    """A server that a test may kill; asking for the shared one first skips where none can be started."""
    if not isinstance(postgres_server, PostgresServer):
        pytest.skip("a server that somebody else runs cannot be killed")
    with (
        tempfile.TemporaryDirectory(prefix="omnirelay-postgres-") as directory,
        PostgresServer(directory) as server,
    ):
        yield server


def test_commits_are_durable(postgres_server: PostgresEndpoint) -> None:
    with postgres_server.connect() as connection:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
            assert row == ("on",), setting


def test_each_test_gets_an_empty_database(postgres_url: str, postgres_server: PostgresEndpoint) -> None:
    assert postgres_url != postgres_server.url
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")) == 0
        connection.execute(text("CREATE TABLE t (n int)"))
    engine.dispose()


def test_a_dropped_database_throws_its_clients_out(postgres_server: PostgresEndpoint) -> None:
    name = f"crowded_{os.getpid()}"
    engine = create_engine(postgres_server.create_database(name))
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        postgres_server.drop_database(name)
        with pytest.raises(DBAPIError, match=r"terminat|closed"):
            connection.execute(text("SELECT 1"))
        connection.invalidate()
    engine.dispose()


def test_a_password_is_asked_for(postgres_server: PostgresEndpoint) -> None:
    if not isinstance(postgres_server, PostgresServer):
        pytest.skip("how somebody else's server lets people in is their choice")
    stranger = make_url(postgres_server.url).set(password="guess")
    with pytest.raises(psycopg.OperationalError, match="password"):
        PostgresEndpoint(stranger.render_as_string(hide_password=False)).connect()


def test_a_committed_row_survives_a_kill_and_an_open_transaction_does_not(own_server: PostgresServer) -> None:
    url = own_server.url
    committed, open_transaction = own_server.connect(), own_server.connect()
    committed.execute("CREATE TABLE t (n int)")
    committed.execute("INSERT INTO t VALUES (1)")
    open_transaction.execute("BEGIN")
    open_transaction.execute("INSERT INTO t VALUES (2)")
    own_server.kill()
    with pytest.raises(psycopg.OperationalError):
        open_transaction.execute("COMMIT")
    with pytest.raises(psycopg.OperationalError):
        own_server.connect()

    own_server.start()
    assert own_server.url == url
    with own_server.connect() as connection:
        assert connection.execute("SELECT n FROM t").fetchall() == [(1,)]


def test_restart_keeps_the_data_and_the_address(own_server: PostgresServer) -> None:
    url = own_server.url
    with own_server.connect() as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS n")
    own_server.restart()
    assert own_server.url == url
    with own_server.connect() as connection:
        assert connection.execute("SELECT n FROM t").fetchall() == [(7,)]


def test_kill_leaves_no_process_behind(own_server: PostgresServer) -> None:
    with own_server.connect():
        processes = _processes_of(own_server.data)
        assert len(processes) > 2
        own_server.kill()
    assert not any(map(_alive, processes))
    own_server.kill()
    own_server.stop()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a child that its parent died")
def test_the_server_dies_with_a_killed_test_run(own_server: PostgresServer) -> None:
    with tempfile.TemporaryDirectory(prefix="omnirelay-postgres-") as directory:
        program = f"""
import time
from tests.servers.postgres import PostgresServer
PostgresServer({directory!r}).start()
print("up", flush=True)
time.sleep(600)
"""
        root = Path(__file__).parents[1]
        run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=root)
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        processes = _processes_of(Path(directory) / "data")
        assert processes
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        deadline = time.monotonic() + 30
        while any(map(_alive, processes)):
            assert time.monotonic() < deadline, "the server outlived its parent"
            time.sleep(0.05)


def _processes_of(data: Path) -> list[psutil.Process]:
    """The postmaster, known by its command line, and everything below it."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if os.fspath(data) in (process.info["cmdline"] or []):
            found += [process, *process.children(recursive=True)]
    return found


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
