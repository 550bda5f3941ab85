"""What every state store does, whatever it is made of."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from lease_core import LeaseError, LeaseToken
from lease_core.deterministic import Fence, StaleFence, StateStore
from lease_core.errors import InvalidInput, QueueClosed, StoreUnavailable
from tests.deterministic import workers
from tests.kills.forks import apart

VALUES: list[Any] = [
    {"a": [1, 2.5, "drei", None, True, {"nested": []}]},
    [],
    {},
    "",
    0,
    False,
    2**63,
    -1.5e300,
    "\0 ' \" \\ \n % ? $1 :x {}",
    "ünïcödé \U0001f980",
    {"key with ' and \"": "v"},
]


def fence(number: int, scope: str) -> Fence:
    return Fence(scope, LeaseToken(7, 1, "lease", number))


def test_what_was_never_stored_is_none(store: StateStore, name: str) -> None:
    assert store.get(name) is None
    assert store.remove(name) is False


def test_values_come_back_as_they_were(store: StateStore, name: str) -> None:
    for at, value in enumerate(VALUES):
        store.put(f"{name}/{at}", value)
        assert store.add(f"{name}/added/{at}", value) == (value, True)
    for at, value in enumerate(VALUES):
        assert store.get(f"{name}/{at}") == value
        assert store.get(f"{name}/added/{at}") == value


def test_put_replaces_and_add_does_not(store: StateStore, name: str) -> None:
    store.put(name, 1)
    store.put(name, 2)
    assert store.add(name, 3) == (2, False)
    assert store.get(name) == 2
    assert store.remove(name) is True
    assert store.add(name, 4) == (4, True)


def test_keys_that_look_alike_are_apart(store: StateStore, name: str) -> None:
    keys = [
        f"{name}{end}" for end in ("/a", "/A", "/a ", "/a/", "//a", "/%61", "/\u00e9", "/e\u0301", "/../a", "/a\n", "*")
    ]
    for key in keys:
        assert store.add(key, key) == (key, True)
    assert [store.get(key) for key in keys] == keys


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "absence"),
        (float("nan"), "not a JSON number"),
        ({"deep": [float("inf")]}, "not a JSON number"),
        (object(), "cannot be written as JSON"),
        ("\ud800", "cannot be written as JSON"),
        ("x" * (4 * 1024 * 1024), "the limit is"),
    ],
    ids=["none", "nan", "infinite", "object", "surrogate", "large"],
)
def test_values_that_cannot_be_kept_are_refused(store: StateStore, name: str, value: Any, problem: str) -> None:
    for act in (store.put, store.add):
        with pytest.raises(InvalidInput, match=problem):
            act(name, value)
    assert store.get(name) is None


@pytest.mark.parametrize("key", ["", "  ", "x" * 1025, "nul\0", "\ud800", 7, None], ids=repr)
def test_keys_that_cannot_be_kept_are_refused(store: StateStore, key: Any) -> None:
    for act in (store.get, store.remove, lambda key: store.put(key, 1), lambda key: store.add(key, 1)):
        with pytest.raises(InvalidInput, match="key"):
            act(key)


def test_one_thread_wins(store: StateStore, name: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        for turn in range(5):
            answers = list(pool.map(lambda number, turn=turn: store.add(f"{name}/{turn}", number), range(6)))
            [winner] = [answer.value for answer in answers if answer.added]
            assert {answer.value for answer in answers} == {winner}


def test_one_process_wins(url: str, name: str) -> None:
    answers = workers.race(workers.add_each, url, name, 15)
    for of_one_key in zip(*answers, strict=True):
        [winner] = [number for number, (_, added) in enumerate(of_one_key) if added]
        assert {value for value, _ in of_one_key} == {winner}


def test_what_was_stored_is_there_for_others(url: str, name: str) -> None:
    with StateStore.open(url) as store:
        store.put(name, {"by": "the first"})
    with StateStore.open(url) as store:
        assert store.get(name) == {"by": "the first"}
    assert apart(_read_elsewhere, url, name) == {"by": "the first"}


def _read_elsewhere(url: str, key: str) -> Any:
    with StateStore.open(url) as store:
        return store.get(key)


def test_a_forked_child_can_go_on_using_it(url: str, name: str) -> None:
    assert apart(_fork_and_add, url, name) == ("child", "child")


def _fork_and_add(url: str, key: str) -> tuple[Any, Any]:
    """In a process with one thread: the child adds with the parent's object, then the parent does."""
    with StateStore.open(url) as store:
        store.put(f"{key}/warm", 1)
        child = os.fork()
        if child == 0:
            added = store.add(key, "child").added
            os._exit(0 if added else 1)
        assert os.waitpid(child, 0)[1] == 0
        return store.get(key), store.add(key, "parent").value


def test_a_database_without_write_ahead_logging_is_used_as_it_is() -> None:
    """Memory that connections share has a journal mode of its own, and SQLite says nothing when asked for another."""
    with StateStore.open("sqlite:///file:shared?mode=memory&cache=shared&uri=true") as store:
        store.put("a", 1)
        assert store.get("a") == 1


def test_memory_does_not_follow_a_fork() -> None:
    assert apart(_fork_in_memory) == QueueClosed.code


def _fork_in_memory() -> str:
    store = StateStore.open("sqlite://")
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            store.put("key", 1)
        except LeaseError as error:
            os.write(writing, error.code.encode())
        os._exit(0)
    os.wait()
    os.close(writing)
    return os.read(reading, 100).decode()


# Fences


@pytest.fixture(params=["sqlite", "postgres", "files", "redis", "memory"])
def fencing(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    from tests.deterministic.conftest import state_url

    with StateStore.open(state_url(request.param, request, tmp_path)) as store:
        yield store


def test_an_older_fence_is_refused_and_writes_nothing(fencing: StateStore, name: str) -> None:
    fencing.put(f"{name}/a", "by 5", fence=fence(5, name))
    for act in (fencing.put, fencing.add):
        with pytest.raises(StaleFence, match="fence 4 is older than 5"):
            act(f"{name}/b", "by 4", fence=fence(4, name))
    with pytest.raises(StaleFence):
        fencing.claim(fence(4, name))
    with pytest.raises(StaleFence):
        fencing.put(f"{name}/a", "by 4", fence=fence(4, name))
    assert (fencing.get(f"{name}/a"), fencing.get(f"{name}/b")) == ("by 5", None)


def test_a_claim_is_enough(fencing: StateStore, name: str) -> None:
    fencing.claim(fence(1, name))
    fencing.claim(fence(2, name))
    with pytest.raises(StaleFence):
        fencing.add(name, "late", fence=fence(1, name))
    assert fencing.add(name, "in time", fence=fence(2, name)).added


def test_the_same_fence_may_write_often_and_scopes_are_apart(fencing: StateStore, name: str) -> None:
    for turn in range(3):
        assert fencing.add(f"{name}/{turn}", turn, fence=fence(9, f"{name}/one")).added
    assert fencing.add(f"{name}/3", 3, fence=fence(1, f"{name}/two")).added


def test_an_older_fence_is_told_so_even_if_the_key_is_taken(fencing: StateStore, name: str) -> None:
    fencing.add(name, "first", fence=fence(2, name))
    with pytest.raises(StaleFence):
        fencing.add(name, "second", fence=fence(1, name))
    assert fencing.add(name, "third", fence=fence(3, name)) == ("first", False)


def test_fences_hold_between_processes(url: str, name: str) -> None:
    """If a check and its write were two steps, an older fence's value would sometimes stay behind."""
    refused = workers.race(workers.put_fenced, url, name, 15)
    with StateStore.open(url) as store:
        assert store.get(f"{name}/value") == 14
    assert sum(refused) > 0


# Opening


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://host/db", "file://elsewhere/folder", "file:///", 7])
def test_an_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(InvalidInput, match="url"):
        StateStore.open(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@127.0.0.1:1/0",
        "postgresql://user:secret@127.0.0.1:1/db",
        "sqlite:////no/such/folder/state.db",
    ],
)
def test_a_store_that_is_away_is_named_without_its_secrets(url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        StateStore.open(url, timeout=1)
    assert "secret" not in str(caught.value)


def test_representations_keep_secrets(deterministic_postgres: str, valkey_url: str) -> None:
    password = sa.make_url(deterministic_postgres).password
    assert isinstance(password, str)
    with StateStore.open(deterministic_postgres) as store:
        assert password not in repr(store)
    with StateStore.open(valkey_url) as store:
        assert "127.0.0.1" in repr(store)


def test_tables_are_made_once_by_many(postgres_url: str, name: str) -> None:
    answers = workers.race(workers.add_each, postgres_url, name, 1)
    assert sum(added for [(_, added)] in answers) == 1


def test_the_key_is_in_the_name_of_its_file(tmp_path: Any) -> None:
    with StateStore.open(f"file://{tmp_path}") as store:
        store.put("orders/seq/1", {"rows": 3})
    digest = hashlib.sha256(b"orders/seq/1").hexdigest()
    text = (tmp_path / "values" / digest[:2] / f"{digest}.json").read_text()
    assert text == '{\n  "key": "orders/seq/1",\n  "value": {\n    "rows": 3\n  }\n}\n'
