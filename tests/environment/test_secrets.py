"""A password in the URL is nobody else's business."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from lease_core import LeaseError, LeaseQueue, QueueConfig, WorkItem
from lease_core.deterministic import StateStore
from lease_core.errors import InvalidInput
from tests.environment.proxy import Proxy

SECRET = "correct-horse-battery"
QUICK = QueueConfig(store_timeout=0.3)


def said_about(act: Callable[[], object]) -> str:
    """Everything a log would hold of the error: the message, its causes, the whole traceback."""
    with pytest.raises(LeaseError) as failure:
        act()
    return repr(failure.value) + "".join(traceback.format_exception(failure.value))


def test_the_password_is_not_in_repr(migrated_postgres_url: str) -> None:
    password = str(sa.make_url(migrated_postgres_url).password)
    with LeaseQueue.open(migrated_postgres_url) as queue:
        assert password not in repr(queue)
        assert password not in str(queue)
        assert "***" in repr(queue)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{SECRET}@127.0.0.1:1/db",
        f"postgresql+psycopg://user:{SECRET}@host.invalid/db",
        f"postgresql://user@127.0.0.1:1/db?password={SECRET}",
        f"mysql://user:{SECRET}@localhost/db",
        f"postgresql+nosuchdriver://user:{SECRET}@localhost/db",
        f"//user:{SECRET}@localhost/db",
        f"postgresql://user:{SECRET}@localhost:port/db",
    ],
)
def test_the_password_is_not_in_errors_about_a_url(url: str) -> None:
    assert SECRET not in said_about(lambda: LeaseQueue.open(url, config=QUICK))
    assert SECRET not in said_about(lambda: StateStore.open(url, timeout=0.3))


def test_a_url_where_a_connection_should_be_is_not_repeated(url: str) -> None:
    with LeaseQueue.open(url) as queue:
        given = f"postgresql://user:{SECRET}@localhost/db"
        with pytest.raises(InvalidInput, match=r"connection: must be .* connection, not str") as refused:
            queue.enqueue(WorkItem("file", "a"), connection=given)
        assert SECRET not in str(refused.value)


def test_a_wrong_password_is_not_repeated(migrated_postgres_url: str) -> None:
    url = sa.make_url(migrated_postgres_url).set(password=SECRET).render_as_string(hide_password=False)
    assert SECRET not in said_about(lambda: LeaseQueue.open(url, config=QUICK))


def test_the_password_is_not_in_errors_about_a_lost_connection(proxy: Proxy) -> None:
    password = str(sa.make_url(proxy.url).password)
    with LeaseQueue.open(proxy.url, config=QUICK) as queue:
        proxy.__exit__()
        for act in (queue.stats, queue.events, lambda: queue.lease("worker"), lambda: queue.lease("worker", wait=1)):
            assert password not in said_about(act)
        assert password not in said_about(lambda: queue.enqueue(WorkItem("file", "a")))


def test_a_password_given_as_a_parameter_is_hidden_as_well(migrated_postgres_url: str) -> None:
    given = sa.make_url(migrated_postgres_url)
    url = given.set(password=None).update_query_dict({"password": str(given.password)})
    with LeaseQueue.open(url) as queue:
        assert str(given.password) not in repr(queue)
