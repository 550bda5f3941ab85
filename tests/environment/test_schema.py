"""Schemas: none, older, newer, made by eight at once, and exactly what the code believes they are."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import LeaseError, SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from lease_core.store import migrate, schema
from tests.kills import audit
from tests.kills.forks import context, running

ITEMS = [WorkItem("file", name, request_id=name) for name in ("a", "b", "c")]


@pytest.fixture
def engine(bare_url: str) -> Iterator[sa.Engine]:
    engine = sa.create_engine(bare_url)
    yield engine
    engine.dispose()


def set_version(engine: sa.Engine, version: str) -> None:
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE {schema.VERSION_TABLE} SET version_num = '{version}'"))


def cycle(queue: LeaseQueue) -> None:
    """Every statement that the queue has, near enough."""
    queue.enqueue(ITEMS)
    one, two, three = queue.lease("worker", limit=3)
    queue.heartbeat([one, two, three]).raise_if_refused()
    queue.complete(one, result={"rows": 1}).raise_if_refused()
    queue.fail(two, "hopeless", requeue=False).raise_if_refused()
    queue.release(three).raise_if_refused()
    queue.restore(queue.drain())
    queue.requeue_dead(queue.dead_letters())
    queue.sweep()
    queue.register_reader("copy", after=1)
    queue.prune_events(before=2)
    queue.complete(queue.lease("worker", limit=3)).raise_if_refused()
    assert queue.stats().completed % 3 == 0
    assert len(queue.inspect([1, 2, 3])) == 3


def test_no_schema_is_a_clear_error_unless_it_may_be_made(bare_url: str, engine: sa.Engine) -> None:
    with pytest.raises(SchemaMissing, match=r"LeaseQueue\.migrate"):
        LeaseQueue.open(bare_url, auto_migrate=False)
    assert sa.inspect(engine).get_table_names() == []
    with LeaseQueue.open(bare_url, auto_migrate=True) as queue:
        cycle(queue)


def test_sqlite_is_migrated_at_open_and_postgresql_is_not(bare_url: str) -> None:
    if bare_url.startswith("sqlite"):
        LeaseQueue.open(bare_url).close()
    else:
        with pytest.raises(SchemaMissing):
            LeaseQueue.open(bare_url)


def test_migrating_again_changes_nothing(url: str) -> None:
    with LeaseQueue.open(url) as queue:
        queue.enqueue(ITEMS)
        LeaseQueue.migrate(url)
        assert queue.stats().pending == 3


def test_a_schema_from_the_future_is_left_alone(url: str, engine: sa.Engine) -> None:
    with LeaseQueue.open(url) as queue:
        queue.enqueue(ITEMS)
        set_version(engine, "9999")
        for act in (lambda: LeaseQueue.open(url), lambda: LeaseQueue.migrate(url)):
            with pytest.raises(SchemaTooNew, match="9999"):
                act()
        set_version(engine, schema.REVISION)
        audit.check_queue(queue)


def test_an_old_schema_that_no_migration_leads_from_is_a_clear_error(url: str, engine: sa.Engine) -> None:
    set_version(engine, "0000")
    with pytest.raises(SchemaError):
        LeaseQueue.open(url, auto_migrate=True)


def test_the_tables_without_their_version_are_a_clear_error(url: str, engine: sa.Engine) -> None:
    """Somebody restored a backup by halves. Whatever is said, it is no crash, and the items stay."""
    with LeaseQueue.open(url) as queue:
        queue.enqueue(ITEMS)
        with engine.begin() as connection:
            connection.execute(sa.text(f"DROP TABLE {schema.VERSION_TABLE}"))
        with pytest.raises(LeaseError):
            LeaseQueue.open(url, auto_migrate=True)
        assert queue.stats().pending == 3


NEXT_RELEASE = f'''
"""A later schema: something more of everything."""
import sqlalchemy as sa
from alembic import op

revision = "0999"
down_revision = {schema.REVISION!r}

def upgrade():
    for table in {sorted(schema.metadata.tables)}:
        op.add_column(table, sa.Column("remark", sa.Text))
    op.create_index("omnirelay_item_remark", "omnirelay_item", ["ns", "remark"])
    op.create_table("omnirelay_more", sa.Column("ns", sa.Integer, primary_key=True), sa.Column("remark", sa.Text))
'''


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The code as it may look after its next migration; ``undo`` goes back to this release."""
    migrations = tmp_path / "code" / "migrations"
    shutil.copytree(Path(migrate.__file__).parent / "migrations", migrations)
    (migrations / "versions" / "0999_next.py").write_text(NEXT_RELEASE)
    monkeypatch.setattr(migrate, "__file__", str(migrations.parent / "migrate.py"))
    monkeypatch.setattr(schema, "REVISION", "0999")
    return monkeypatch


def test_an_older_schema_is_migrated_with_its_items(
    url: str, engine: sa.Engine, request: pytest.FixtureRequest
) -> None:
    with LeaseQueue.open(url) as queue:
        cycle(queue)
        queue.enqueue([WorkItem("file", "d")])
        [lease] = queue.lease("worker")
        before = queue.stats().head
    request.getfixturevalue("next_release")
    if engine.dialect.name == "postgresql":
        with pytest.raises(SchemaOutdated, match=r"LeaseQueue\.migrate"):
            LeaseQueue.open(url)
        assert not sa.inspect(engine).has_table("omnirelay_more")
        LeaseQueue.migrate(url)
    with LeaseQueue.open(url) as queue:
        assert sa.inspect(engine).has_table("omnirelay_more")
        assert queue.stats().head == before
        queue.complete(lease).raise_if_refused()
        cycle_of_new_items(queue)


def cycle_of_new_items(queue: LeaseQueue) -> None:
    queue.enqueue([WorkItem("file", "new"), WorkItem("file", "newer")])
    queue.complete(queue.lease("worker", limit=2)).raise_if_refused()


def test_old_code_goes_on_while_another_process_migrates(
    url: str, engine: sa.Engine, request: pytest.FixtureRequest
) -> None:
    """A rolling upgrade: the running processes of this release meet columns, indexes and tables they don't know."""
    with LeaseQueue.open(url) as queue:
        queue.enqueue([WorkItem("file", "before")])
        [held] = queue.lease("worker")
        patch = request.getfixturevalue("next_release")
        LeaseQueue.migrate(url)
        patch.undo()
        assert sa.inspect(engine).has_table("omnirelay_more")
        queue.complete(held).raise_if_refused()
        queue.enqueue([WorkItem("file", "x"), WorkItem("file", "y")])
        queue.complete(queue.lease("worker", limit=2), result={"rows": 2}).raise_if_refused()
        audit.check_queue(queue)
        with pytest.raises(SchemaTooNew):
            LeaseQueue.open(url)


def test_columns_and_tables_that_the_code_does_not_know_do_no_harm(url: str, engine: sa.Engine) -> None:
    with engine.begin() as connection:
        for table in schema.metadata.tables:
            connection.execute(sa.text(f"ALTER TABLE {table} ADD COLUMN remark TEXT"))
        connection.execute(sa.text("CREATE TABLE omnirelay_more (remark TEXT)"))
    LeaseQueue.migrate(url)
    with LeaseQueue.open(url) as queue:
        cycle(queue)


# The migrations and the metadata describe the same database


def test_the_migrations_make_what_the_metadata_says(url: str, engine: sa.Engine) -> None:
    with engine.connect() as connection:
        options = {"version_table": schema.VERSION_TABLE, "compare_type": True, "compare_server_default": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, schema.metadata) == []


def test_the_migrations_make_what_create_all_makes(bare_url: str, engine: sa.Engine) -> None:
    schema.metadata.create_all(engine)
    expected = described(engine)
    schema.metadata.drop_all(engine)
    LeaseQueue.migrate(bare_url)
    found = described(engine)
    assert found == expected
    assert {index for kind, index in found if kind == "index"} >= {
        index.name for table in schema.metadata.tables.values() for index in table.indexes
    }


def test_a_second_database_of_a_process_is_made_like_the_first(tmp_path: Path) -> None:
    made: list[list[Any]] = []
    migrate._made_before.clear()
    for name in ("first", "second"):
        url = f"sqlite:///{tmp_path / name}.db"
        LeaseQueue.migrate(url)
        with sa.create_engine(url).connect() as connection:
            objects = connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY rowid")
            version = connection.exec_driver_sql(f"SELECT version_num FROM {schema.VERSION_TABLE}")
            made.append([*objects, *version])
    assert made[0] == made[1]
    assert len(made[0]) > 10


def described(engine: sa.Engine) -> dict[tuple[str, str], Any]:
    """Everything the database itself knows about the queue's tables: types, keys, defaults, indexes, options."""
    inspector = sa.inspect(engine)
    facts: dict[tuple[str, str], Any] = {}
    for table in schema.metadata.tables:
        facts["columns", table] = [{**column, "type": str(column["type"])} for column in inspector.get_columns(table)]
        facts["key", table] = inspector.get_pk_constraint(table)["constrained_columns"]
        unique = inspector.get_unique_constraints(table)
        facts["unique", table] = sorted(constraint["column_names"] for constraint in unique)
    if engine.dialect.name == "sqlite":
        source = "SELECT type, name, sql FROM sqlite_master WHERE name LIKE 'omnirelay%' AND sql IS NOT NULL"
    else:
        source = (
            "SELECT 'index', indexname, indexdef FROM pg_indexes WHERE tablename LIKE 'omnirelay%' UNION ALL "
            "SELECT 'options', relname, reloptions::text FROM pg_class WHERE relname LIKE 'omnirelay%'"
        )
    with engine.connect() as connection:
        for kind, name, sql in connection.execute(sa.text(source)):
            if not name.startswith(schema.VERSION_TABLE):
                facts[kind, name] = sql and " ".join(re.sub(r'"', "", sql).split())
    return facts


# Eight processes open a new database in the same moment


def open_together(url: str, at: float, n: int, pipe: Any) -> None:
    try:
        time.sleep(max(0.0, at - time.time()))
        with LeaseQueue.open(url, auto_migrate=True) as queue:
            [receipt] = queue.enqueue(WorkItem("file", str(n), request_id=str(n)))
            pipe.send((queue.queue_id, receipt.sequence_id))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("round_", range(3))
def test_eight_processes_open_a_new_database_at_once(bare_url: str, round_: int) -> None:
    at = time.time() + 0.5
    pipes = [context.Pipe() for _ in range(8)]
    with ExitStack() as stack:
        for n, (_, theirs) in enumerate(pipes):
            stack.enter_context(running(open_together, bare_url, at, n, theirs))
        answers = [ours.recv() if ours.poll(60) else "no answer" for ours, _ in pipes]
    assert [answer for answer in answers if isinstance(answer, str)] == []
    assert len({queue_id for queue_id, _ in answers}) == 1
    assert sorted(sequence_id for _, sequence_id in answers) == list(range(1, 9))
    with LeaseQueue.open(bare_url) as queue:
        audit.check_queue(queue)
