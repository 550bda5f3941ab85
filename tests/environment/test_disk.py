"""Databases that cannot be written, directories that are not there, disks that are full."""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import SchemaMissing, StoreFull, StoreReadOnly, StoreUnavailable
from lease_core.store import schema
from tests.kills import audit

KIBIBYTES = 1024


@pytest.fixture
def filled(sqlite_path: Path) -> Path:
    """A file with two pending items and a dead one in it."""
    with LeaseQueue.open(f"sqlite:///{sqlite_path}") as queue:
        queue.enqueue([WorkItem("file", name) for name in "abc"])
        queue.fail(queue.lease("worker"), "hopeless", requeue=False)
    return sqlite_path


def check_read_only(queue: LeaseQueue) -> None:
    assert (queue.stats().pending, queue.stats().dead) == (2, 1)
    assert len(queue.events()) == queue.stats().head
    assert [each.item.resource_id for each in queue.dead_letters()] == ["a"]
    assert [status.state for status in queue.inspect([1, 2, 3])] == ["dead", "pending", "pending"]
    for write in (
        lambda: queue.enqueue(WorkItem("file", "d")),
        lambda: queue.lease("worker"),
        lambda: queue.lease("worker", wait=1),
        lambda: queue.requeue_dead(1),
        lambda: queue.drain(),
    ):
        with pytest.raises(StoreReadOnly):
            write()
    assert (queue.stats().pending, queue.stats().dead) == (2, 1)


def test_a_read_only_file_can_be_read_and_says_that_it_cannot_be_written(filled: Path) -> None:
    with LeaseQueue.open(f"sqlite:///file:{filled}?mode=ro&uri=true") as queue:
        check_read_only(queue)


def test_a_read_only_connection_sees_what_a_writer_adds(filled: Path) -> None:
    with (
        LeaseQueue.open(f"sqlite:///{filled}") as writer,
        LeaseQueue.open(f"sqlite:///file:{filled}?mode=ro&uri=true") as reader,
    ):
        writer.enqueue(WorkItem("file", "d"))
        assert reader.stats().pending == 3
        assert reader.events() == writer.events()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_without_write_permission(filled: Path) -> None:
    filled.chmod(0o400)
    with LeaseQueue.open(f"sqlite:///{filled}") as queue:
        check_read_only(queue)


def test_a_new_namespace_in_a_read_only_file_is_refused(filled: Path) -> None:
    with pytest.raises(StoreReadOnly):
        LeaseQueue.open(f"sqlite:///file:{filled}?mode=ro&uri=true", namespace="new")


def test_a_read_only_file_without_a_queue(sqlite_path: Path) -> None:
    sqlite3.connect(sqlite_path).execute("CREATE TABLE other (x)").connection.close()
    with pytest.raises((StoreReadOnly, SchemaMissing)):
        LeaseQueue.open(f"sqlite:///file:{sqlite_path}?mode=ro&uri=true")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="/not/there does not exist"):
        LeaseQueue.open(f"sqlite:///{tmp_path}/not/there/queue.db")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_in_a_file_uri(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        LeaseQueue.open(f"sqlite:///file:{tmp_path}/not/there/queue.db?uri=true")


def test_a_path_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        LeaseQueue.open(f"sqlite:///{tmp_path}")


def test_a_file_that_is_no_database(sqlite_path: Path) -> None:
    sqlite_path.write_bytes(b"these are the accounts for March" * 100)
    with pytest.raises(StoreUnavailable, match="not a database"):
        LeaseQueue.open(f"sqlite:///{sqlite_path}")
    assert sqlite_path.read_bytes().startswith(b"these are the accounts")


@contextmanager
def no_room_beyond(pages: int) -> Iterator[None]:
    """Let any SQLite file that is opened in the block have so many pages and no more."""

    def limit(connection: sqlite3.Connection, _: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages}")

    sa.event.listen(sa.Engine, "connect", limit)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "connect", limit)


def fill_up(queue: LeaseQueue, size: int = 20 * KIBIBYTES) -> int:
    """Enqueue batches until there is no room; the one that did not fit must leave no trace. Gives how many did."""
    for n in range(100):
        before = audit.everything(queue)
        try:
            queue.enqueue([WorkItem("file", f"{n}/{part}", body=os.urandom(size // 4)) for part in range(4)])
        except StoreFull:
            assert audit.everything(queue) == before
            return n
    raise AssertionError("the disk never filled up")


def test_a_full_disk_takes_nothing_in_part_and_works_again_once_there_is_room(sqlite_path: Path) -> None:
    url = f"sqlite:///{sqlite_path}"
    with no_room_beyond(pages=150), LeaseQueue.open(url) as queue:
        taken = fill_up(queue)
        assert queue.stats().pending == 4 * taken > 0
        audit.check_queue(queue)
        with pytest.raises(StoreFull, match="free space"):
            fill_to_the_last_page(queue)
        audit.check_queue(queue)
    with LeaseQueue.open(url) as queue:
        leases = queue.lease("worker", limit=10_000)
        queue.complete(leases).raise_if_refused()
        assert len(leases) == queue.stats().completed
        audit.check_queue(queue)


def fill_to_the_last_page(queue: LeaseQueue) -> None:
    for n in range(1_000):
        queue.enqueue(WorkItem("file", f"small {n}", body=os.urandom(100)))
        for lease in queue.lease("worker"):
            queue.fail(lease, "x" * 1000, delay=0)


TINY_DISK = """
mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -m tests.environment.test_disk "$1"
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a file system of its own")
def test_a_really_full_disk(tmp_path: Path) -> None:
    """A file system of one mebibyte, in a name space of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = ["sh", "-c", f"mount -t tmpfs tmpfs {tmp_path}"]
    if not shutil.which("unshare") or subprocess.run([*unshare, *probe], capture_output=True).returncode:
        pytest.skip("no file systems may be mounted here")
    script = ["sh", "-c", TINY_DISK, "sh", str(tmp_path), sys.executable]
    done = subprocess.run([*unshare, *script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def on_a_tiny_disk(directory: Path) -> None:
    ballast = directory / "ballast"
    ballast.write_bytes(b"." * 300 * KIBIBYTES)
    with LeaseQueue.open(f"sqlite:///{directory}/queue.db") as queue:
        taken = fill_up(queue)
        assert taken > 0
        audit.check_queue(queue)
        ballast.unlink()
        queue.enqueue(WorkItem("file", "last"))
        leases = queue.lease("worker", limit=10_000)
        assert len(leases) == 4 * taken + 1
        queue.complete(leases).raise_if_refused()
        audit.check_queue(queue)
        fill_up(queue)
    with LeaseQueue.open(f"sqlite:///{directory}/queue.db") as queue:
        audit.check_queue(queue)


# PostgreSQL


@pytest.fixture
def owner(migrated_postgres_url: str) -> Iterator[sa.Connection]:
    engine = sa.create_engine(migrated_postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def test_a_postgresql_user_who_may_only_read(owner: sa.Connection, migrated_postgres_url: str) -> None:
    with LeaseQueue.open(migrated_postgres_url) as queue:
        queue.enqueue([WorkItem("file", name) for name in "abc"])
        queue.fail(queue.lease("worker"), "hopeless", requeue=False)
    role = f"reader_{secrets.token_hex(4)}"
    owner.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'reader'")
    try:
        owner.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
        url = sa.make_url(migrated_postgres_url).set(username=role, password="reader")
        with LeaseQueue.open(url) as queue:
            check_read_only(queue)
        with pytest.raises(StoreReadOnly):
            LeaseQueue.open(url, namespace="new")
    finally:
        owner.exec_driver_sql(f"DROP OWNED BY {role}")
        owner.exec_driver_sql(f"DROP ROLE {role}")


def test_a_postgresql_user_who_may_not_create_tables(owner: sa.Connection, postgres_url: str) -> None:
    role = f"guest_{secrets.token_hex(4)}"
    owner.exec_driver_sql(f"CREATE ROLE {role} LOGIN PASSWORD 'guest'")
    try:
        for table in [schema.VERSION_TABLE, *schema.metadata.tables]:
            owner.exec_driver_sql(f"DROP TABLE {table}")
        url = sa.make_url(postgres_url).set(username=role, password="guest")
        with pytest.raises(StoreReadOnly):
            LeaseQueue.open(url, auto_migrate=True)
    finally:
        owner.exec_driver_sql(f"DROP ROLE {role}")


NO_SPACE = """
CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER no_space BEFORE INSERT ON omnirelay_log FOR EACH ROW EXECUTE FUNCTION no_space()
"""


def test_a_full_postgresql_takes_nothing_in_part(owner: sa.Connection, migrated_postgres_url: str) -> None:
    """The server's own error, raised at the log: by then the items have been written."""
    with LeaseQueue.open(migrated_postgres_url) as queue:
        queue.enqueue([WorkItem("file", name) for name in "abc"])
        before = audit.everything(queue)
        owner.exec_driver_sql(NO_SPACE)
        for write in (lambda: queue.enqueue(WorkItem("file", "d")), lambda: queue.lease("worker"), queue.drain):
            with pytest.raises(StoreFull, match="free space"):
                write()
        assert audit.everything(queue) == before
        owner.exec_driver_sql("DROP TRIGGER no_space ON omnirelay_log")
        queue.enqueue(WorkItem("file", "d"))
        assert len(queue.lease("worker", limit=10)) == 4
        audit.check_queue(queue)


if __name__ == "__main__":
    on_a_tiny_disk(Path(sys.argv[1]))
