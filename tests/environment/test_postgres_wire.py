"""What is sent to PostgreSQL arrives as it was."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import StoreBusy
from lease_core.store.wire import Wire

LISTS: list[tuple[str, list[Any]]] = [
    ("bigint", [1]),
    ("bigint", [0, -1, 32_767, 32_768, 2**31, 2**63 - 1, -(2**63) + 1]),
    ("bigint", [None, 7, None]),
    ("bigint", []),
    ("bigint", [None, None]),
    ("text", ["", "a", 'quo"te', "back\\slash", "{}", "NULL", "ä€😀", "x" * 255, "x" * 256, "ä" * 200]),
    ("text", [None, "", None]),
    ("bytea", [b"", b"\x00\xff", b"y" * 255, b"y" * 100_000]),
    ("bytea", [b"", None]),
    ("boolean", [True, False]),
    ("double precision", [1.5, None]),
]


@pytest.fixture
def wire(postgres_url: str) -> Any:
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield Wire(connection)


@pytest.mark.parametrize(("kind", "values"), LISTS, ids=lambda value: str(value)[:20])
def test_a_list(wire: Wire, kind: str, values: list[Any]) -> None:
    for _ in range(2):  # prepared, then used again
        assert wire.exchange([(f"SELECT $1::{kind}[], $2::integer", (values, 5))]) == [[(values, 5)]]


def test_lists_between_other_values(wire: Wire) -> None:
    values = (1, ["a", None], None, [1, 2], b"b", "c")
    sql = "SELECT $1::bigint, $2::text[], $3::text, $4::bigint[], $5::bytea, $6::text"
    assert wire.exchange([(sql, values)]) == [[values]]


def test_a_number_that_is_too_large_is_an_error_of_the_driver(wire: Wire) -> None:
    with pytest.raises(psycopg.Error):
        wire.exchange([("SELECT $1::bigint[]", ([2**64],))])


def test_what_was_sent_after_an_error_is_prepared_when_it_is_sent_again(wire: Wire) -> None:
    later = [("SELECT $1::integer", (5,)), ("SELECT $1::text", ("a",))]
    with pytest.raises(psycopg.errors.DivisionByZero):
        wire.exchange([("SELECT 1 / 0", ()), *later])
    assert wire.exchange(later) == [[(5,)], [("a",)]]


def test_a_queue_that_was_busy_works_as_soon_as_it_is_not(postgres_url: str) -> None:
    with (
        LeaseQueue.open(postgres_url, auto_migrate=True) as queue,
        LeaseQueue.open(postgres_url, config=QueueConfig(store_timeout=0.2)) as other,
        psycopg.connect(postgres_url.replace("+psycopg", "")) as holder,
    ):
        queue.enqueue(WorkItem("file", "a"), connection=holder)  # and not committed yet
        with pytest.raises(StoreBusy):
            other.enqueue(WorkItem("file", "b"))
        holder.commit()
        other.enqueue(WorkItem("file", "b"))
        assert other.stats().pending == 2


def test_texts_are_what_they_were_whatever_encoding_the_client_prefers(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    items = [WorkItem("täst", f"é{n}", request_id=f"ré{n}") for n in range(2)]
    with LeaseQueue.open(postgres_url, auto_migrate=True) as queue:
        queue.enqueue(items)
        assert [lease.item for lease in queue.lease("w", limit=2)] == items
        assert [receipt.duplicate for receipt in queue.enqueue(items[:1])] == [True]
        assert [event.item.resource_id for event in queue.events() if event.item] == ["é0", "é1"] * 2
