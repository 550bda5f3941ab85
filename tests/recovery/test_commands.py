"""The same from a shell: each command does its work in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.cli import standby as standby_command
from lease_core.errors import QueueSealed
from lease_core.recovery import Standby
from lease_core.replication import JsonlSink, Relay, Rules
from tests.copies import queue_with_copies


def omnirelay(*arguments: str, code: int = 0, timeout: float = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lease_core.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A queue with five events, and copies of its log in ``lines``, ``objects`` and ``table.db``."""
    return queue_with_copies(tmp_path)


def test_rebuild_and_verify(url: str, tmp_path: Path) -> None:
    for at, source in enumerate((url, f"jsonl:{tmp_path}/lines", f"file://{tmp_path}/objects")):
        copy = f"sqlite:///{tmp_path}/{at}.db"
        assert "2 pending, 0 active" in omnirelay("rebuild", source, copy, "--namespace", "landing")
        told = omnirelay("verify", copy, "--against", source, "--tables", copy, "--namespace", "landing")
        assert told.strip() == "good up to event 5, which is the last"


def test_damage_is_told_with_a_number_and_an_exit_code(url: str, tmp_path: Path) -> None:
    [file] = [path for path in (tmp_path / "lines").rglob("*.jsonl") if path.is_file()]
    file.write_bytes(file.read_bytes().replace(b'"b"', b'"x"'))
    assert "event 1:" in omnirelay("verify", f"jsonl:{tmp_path}/lines", "--namespace", "landing", code=1)
    told = omnirelay(
        "rebuild", f"jsonl:{tmp_path}/lines", f"sqlite:///{tmp_path}/x.db", "--namespace", "landing", code=2
    )
    assert "the first bad event is 1" in told
    assert "Traceback" not in told


def test_a_copy_that_is_behind_is_good_only_if_that_is_allowed(url: str, tmp_path: Path) -> None:
    with LeaseQueue.open(url, "landing") as queue:
        queue.enqueue([WorkItem("file", name) for name in "de"])
    arguments = ("verify", f"jsonl:{tmp_path}/lines", "--against", url, "--namespace", "landing")
    assert "event 6: the copy ends at 5, and the other has events up to 7" in omnirelay(*arguments, code=1)
    told = omnirelay(*arguments, "--lag-allowed", "2")
    assert told.strip() == "good up to event 5; the other has events up to 7, 2 more"


def test_snapshot_and_rebuild_from_it(url: str, tmp_path: Path) -> None:
    assert "as of event 5" in omnirelay("snapshot", url, str(tmp_path / "file"), "--namespace", "landing")
    copy = f"sqlite:///{tmp_path}/copy.db"
    omnirelay("rebuild", url, copy, "--namespace", "landing", "--snapshot", str(tmp_path / "file"))
    with LeaseQueue.open(copy, "landing") as queue:
        assert queue.stats().pending == 2
    check = ("verify", copy, "--tables", copy, "--namespace", "landing")
    assert "Give a snapshot" in omnirelay(*check, code=2)
    told = omnirelay(*check, "--snapshot", str(tmp_path / "file"))
    assert told.strip() == "good up to event 5, which is the last"


def test_a_standby_follows_and_takes_over(url: str, tmp_path: Path) -> None:
    copy = f"sqlite:///{tmp_path}/standby.db"
    arguments = [sys.executable, "-m", "lease_core.cli", "standby", url, copy, "--namespace", "landing"]
    following = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while True:
        with LeaseQueue.open(copy, "landing") as behind:
            if behind.stats().head == 5:
                break
        assert time.monotonic() < deadline
        time.sleep(0.1)
    following.send_signal(signal.SIGTERM)
    assert following.wait(30) == 0
    assert "primary now, at event 5" in omnirelay("standby", url, copy, "--namespace", "landing", "--promote")
    with LeaseQueue.open(url, "landing") as old, LeaseQueue.open(copy, "landing") as new:
        with pytest.raises(QueueSealed):
            old.lease("worker")
        assert len(new.lease("worker", limit=5)) == 2


def test_a_standby_of_a_damaged_copy_ends_at_once(url: str, tmp_path: Path) -> None:
    with LeaseQueue.open(url, "landing") as queue:  # several batches: damage to the last could be one being written
        Relay(queue, [JsonlSink(tmp_path / "parts")], rules=Rules(linger=0, batch_size=2)).run_once()
    [file] = [path for path in (tmp_path / "parts").rglob("*.jsonl") if path.is_file()]
    file.write_bytes(file.read_bytes().replace(b'"b"', b'"x"', 1))
    copy = f"sqlite:///{tmp_path}/standby.db"
    told = omnirelay("standby", f"jsonl:{tmp_path}/parts", copy, "--namespace", "landing", code=1, timeout=40)
    assert "the standby of landing has stopped" in told


def test_a_standby_goes_on_when_its_source_cannot_be_asked(url: str, tmp_path: Path, caplog: Any) -> None:
    source = LeaseQueue.open(url, "landing")
    with Standby(source, f"sqlite:///{tmp_path}/standby.db", namespace="landing") as standby:
        source.close()
        standby_command._report(standby)
    assert "the source cannot be asked how far it is" in caplog.text


def test_what_is_no_source_is_told_in_a_line(tmp_path: Path) -> None:
    told = omnirelay("verify", "ftp://nowhere", code=2)
    assert told.startswith("omnirelay verify: source: 'ftp' is no kind of source")
    assert "Traceback" not in told


def test_a_copy_that_is_not_there_is_not_good(url: str, tmp_path: Path) -> None:
    """A path or a name that was mistyped must not pass for a copy without damage."""
    told = omnirelay("verify", f"file://{tmp_path}/objects", "--namespace", "typo", code=2)
    assert "holds no event of namespace 'typo'; is it the right one?" in told
    told = omnirelay("verify", f"table:{url}", "--namespace", "landing", code=2)
    assert told.startswith("omnirelay verify: the copy's database cannot be read (OperationalError: no such table")
    assert "good up to event 5" in omnirelay("verify", f"file://{tmp_path}/objects", "--namespace", "landing")


@pytest.mark.parametrize("source", ["none", "postgresql://127.0.0.1:1/gone"])
def test_a_standby_is_promoted_when_all_else_is_lost(source: str, url: str, tmp_path: Path) -> None:
    copy = f"sqlite:///{tmp_path}/standby.db"
    with LeaseQueue.open(url, "landing") as primary, Standby(primary, copy) as standby:
        standby.follow()
    if source != "none":
        omnirelay("standby", source, copy, "--namespace", "landing", "--promote", code=2)
    told = omnirelay("standby", source, copy, "--namespace", "landing", "--promote", "--primary-is-lost")
    assert "primary now, at event 5: 2 pending" in told
    with LeaseQueue.open(copy, "landing") as new:
        assert len(new.lease("worker", limit=5)) == 2


def test_a_place_without_a_copy_is_not_promoted(tmp_path: Path) -> None:
    told = omnirelay("standby", "none", f"sqlite:///{tmp_path}/empty.db", "--promote", "--primary-is-lost", code=2)
    assert "there is no copy of namespace 'resourcelease' there" in told


def test_a_primary_that_came_back_is_sealed(url: str, tmp_path: Path) -> None:
    copy = f"sqlite:///{tmp_path}/copy.db"
    lines = f"jsonl:{tmp_path}/lines"
    omnirelay("standby", lines, copy, "--namespace", "landing", "--promote", "--primary-is-lost")
    assert "wrong way round" in omnirelay("standby", copy, url, "--namespace", "landing", "--seal", code=2)
    assert "sealed at event 5" in omnirelay("standby", url, copy, "--namespace", "landing", "--seal")
    with LeaseQueue.open(url, "landing") as old, LeaseQueue.open(copy, "landing") as new:
        with pytest.raises(QueueSealed):
            old.lease("worker")
        assert new.lease("worker")


def test_a_primary_that_is_said_to_be_lost_and_answers_is_sealed(url: str, tmp_path: Path) -> None:
    copy = f"sqlite:///{tmp_path}/copy.db"
    told = omnirelay("standby", url, copy, "--namespace", "landing", "--promote", "--primary-is-lost")
    assert "answers, and was sealed" in told
    with LeaseQueue.open(url, "landing") as old, pytest.raises(QueueSealed):
        old.lease("worker")


def test_what_a_log_does_not_say_can_be_said(url: str, tmp_path: Path) -> None:
    with LeaseQueue.open(url, "landing") as queue:
        queue.enqueue([WorkItem("file", "same") for _ in range(3)])
        Relay(queue, JsonlSink(tmp_path / "more")).run_once()
    copy = f"sqlite:///{tmp_path}/copy.db"
    options = ("--namespace", "landing", "--exclusive", "resource", "--capacity", "9")
    told = omnirelay("rebuild", f"jsonl:{tmp_path}/more", copy, *options)
    assert "does not say" not in told
    with LeaseQueue.open(copy, "landing") as queue:
        assert [lease.item.resource_id for lease in queue.lease("worker", limit=9)].count("same") == 1
    told = omnirelay(
        "rebuild", f"jsonl:{tmp_path}/more", f"{copy}2", "--namespace", "landing", "--capacity", "-1", code=2
    )
    assert "capacity: Input should be greater" in told
