"""A folder as a store: what crashes, torn files and stuck processes leave behind, and what becomes of it."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from lease_core import LeaseToken
from lease_core.deterministic import Fence, StateStore
from lease_core.deterministic.file_state import FileStateStore
from lease_core.errors import InvalidInput, StoreBusy, StoreError
from tests.deterministic import workers
from tests.kills.forks import KILLED, context, running, start


@pytest.fixture
def store(tmp_path: Path) -> FileStateStore:
    return FileStateStore(tmp_path / "state")


def url(store: FileStateStore) -> str:
    return f"file://{store.folder}"


def test_a_torn_file_is_moved_aside_wherever_it_was_torn(
    store: FileStateStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("key", {"rows": 3})
    path = store.path("key")
    whole = path.read_bytes()
    for length in range(len(whole) - 1):  # the last byte is a line's end, which nothing depends on
        path.write_bytes(whole[:length])
        assert store.add("key", "anew") == ("anew", True), f"torn after {length} bytes"
        assert store.get("key") == "anew"
    assert len(list(path.parent.glob("*.torn-*"))) == len(whole) - 1
    assert "treated as absent" in caplog.text


def test_a_reader_alone_also_gets_past_a_torn_file(store: FileStateStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store.put("key", 1)
    store.path("key").write_bytes(b"\0" * 40)
    assert store.get("key") is None
    [kept] = store.path("key").parent.glob("*.torn-*")
    assert kept.read_bytes() == b"\0" * 40
    store.put("key", 2)
    assert store.get("key") == 2


def test_a_file_of_another_key_is_not_taken_for_this_ones(store: FileStateStore) -> None:
    store.put("one", 1)
    store.path("two").parent.mkdir(parents=True, exist_ok=True)
    store.path("one").rename(store.path("two"))
    assert store.get("two") is None


def test_a_torn_fence_stops_writers_and_says_how_to_go_on(store: FileStateStore) -> None:
    fence = Fence("item/q/1", LeaseToken(1, 1, "lease", 5))
    store.claim(fence)
    store._path("fences", fence.scope).write_bytes(b"{")
    with pytest.raises(StoreError, match="end the lease on item 1, then remove that file"):
        store.add("key", 1, fence=fence)
    assert store.get("key") is None


@pytest.mark.parametrize("function", ["fsync", "link"])
def test_a_kill_while_writing_leaves_nothing_or_all(store: FileStateStore, function: str) -> None:
    process = start(workers.die_while_placing, url(store), "key", function)
    process.join(30)
    assert process.exitcode == KILLED
    assert store.get("key") is None
    assert store.add("key", "whole") == ("whole", True)


def test_what_a_crash_left_is_cleared_away_later(store: FileStateStore) -> None:
    store.put("key", 1)
    old, young = (store.path("key").with_name(name) for name in ("x-1-aa.tmp", "y-2-bb.tmp"))
    for leftover in (old, young):
        leftover.write_text("{")
    os.utime(old, (time.time() - 7_200,) * 2)
    FileStateStore(store.folder)
    assert (old.exists(), young.exists()) == (False, True)


def test_file_and_folder_are_flushed_around_the_renaming(
    store: FileStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content must be on disk before its name is, and the name before the call returns."""
    store.put("key", 0)  # so that the folders are there
    order: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "link")}

    def flush(handle: int) -> None:
        order.append("flush folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "flush file")
        real["fsync"](handle)

    def placing(name: str) -> None:
        monkeypatch.setattr(os, name, lambda *paths: (order.append(name), real[name](*paths)))

    monkeypatch.setattr(os, "fsync", flush)
    placing("replace")
    placing("link")
    store.put("key", 1)
    assert order == ["flush file", "replace", "flush folder"]
    order.clear()
    store.remove("key")
    assert order == ["flush folder"]
    order.clear()
    store.add("key", 2)
    assert order == ["flush file", "link", "flush folder"]


def test_without_links_it_works_all_the_same(store: FileStateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert store.add("key", 1) == (1, True)
    assert store.add("key", 2) == (1, False)


def test_a_lock_is_waited_for_only_so_long_and_dies_with_its_holder(tmp_path: Path) -> None:
    store = FileStateStore(tmp_path, timeout=0.2)
    ours, theirs = context.Pipe()
    with running(workers.hold_lock, url(store), "key", theirs):
        assert ours.poll(30)
        assert ours.recv() == "locked"
        with pytest.raises(StoreBusy, match="Nothing was written"):
            store.put("key", 1)
        assert store.get("key") is None
    store.put("key", 2)  # the holder was killed
    assert store.get("key") == 2


def test_relative_folders_and_odd_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with StateStore.open("file:some/where%20else") as store:
        store.put("key", 1)
    assert (tmp_path / "some" / "where else" / "values").is_dir()


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InvalidInput, match="must name a folder"):
        StateStore.open(f"file://{tmp_path / 'taken'}")
