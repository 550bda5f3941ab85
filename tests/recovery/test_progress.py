"""The line that says how far a rebuild or a verification is, as it stands on a terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.cli import main
from lease_core.recovery import progress, rebuild
from lease_core.recovery.progress import Bar, end_of
from lease_core.replication import (
    HubServer,
    HubSink,
    JsonlSink,
    ObjectStoreSink,
    Relay,
    Rules,
    SqlSink,
    read_hub,
    read_jsonl,
    read_segments,
    read_sql,
)

EVENTS = 2_500


class Terminal(io.StringIO):
    """Standard error as a terminal that understands what is written to it."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What can be read on it; the last line is the one that the cursor is in."""
        lines, row = [""], 0
        for part in re.findall("\r|\n|\x1b\\[1A|\x1b\\[K|[^\r\n\x1b]+", self.getvalue()):
            if part == "\n":
                row += 1
                lines += [""] * (row == len(lines))
            elif part == "\x1b[1A":
                row -= 1
            elif part not in ("\r", "\x1b[K"):  # every line is written from its beginning, and cleared behind
                lines[row] = part
        return [re.sub(r", [\d,]+/s", "", line) for line in lines]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))  # pytest puts its own in the real one
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    return made


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[str]:
    """A queue with copies of its log in ``lines``, ``objects``, ``table.db`` and a hub. Gives the hub's address."""
    with (
        LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue,
        HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0") as hub,
    ):
        for start in range(0, EVENTS, 500):
            queue.enqueue([WorkItem("file", str(start + i)) for i in range(500)])
        sinks = [
            JsonlSink(tmp_path / "lines", max_bytes=100_000),
            ObjectStoreSink(f"file://{tmp_path}/objects"),
            SqlSink(f"sqlite:///{tmp_path}/table.db"),
            HubSink(f"127.0.0.1:{hub.port}", source="eu"),
        ]
        with Relay(queue, sinks, rules=Rules(linger=0, batch_size=300)) as relay:
            assert relay.wait_until(EVENTS, 60)
        yield f"127.0.0.1:{hub.port}"


def test_every_kind_of_copy_says_how_far_it_reaches(copied: str, tmp_path: Path) -> None:
    namespace = "resourcelease"
    table = f"sqlite:///{tmp_path}/table.db"
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        assert end_of(queue) == EVENTS
    assert end_of(read_jsonl(tmp_path / "lines")) == EVENTS
    assert end_of(read_segments(f"file://{tmp_path}/objects")) == EVENTS
    assert end_of(read_sql(table, namespace)) == EVENTS
    assert end_of(read_hub(copied, "eu", namespace)) == EVENTS
    for empty in (read_segments(f"file://{tmp_path}/objects", "x"), read_sql(table, "x"), read_hub(copied, "eu", "x")):
        assert end_of(empty) is None


def test_a_copy_that_cannot_be_asked_is_counted_instead(copied: str, tmp_path: Path) -> None:
    assert end_of(read_hub("127.0.0.1:1", "eu")) is None
    assert end_of(read_sql(f"sqlite:///{tmp_path}/queue.db", "resourcelease")) is None
    for file in (tmp_path / "objects").rglob("*.jsonl"):
        file.write_bytes(b"damaged")
    assert end_of(read_segments(f"file://{tmp_path}/objects")) is None


@pytest.mark.parametrize("source", ["queue", "lines", "objects", "table", "hub"])
def test_verifying_shows_a_bar_with_a_goal_and_ends_its_line(
    source: str, copied: str, tmp_path: Path, terminal: Terminal
) -> None:
    address = {
        "queue": f"sqlite:///{tmp_path}/queue.db",
        "lines": f"jsonl:{tmp_path}/lines",
        "objects": f"file://{tmp_path}/objects",
        "table": f"table:sqlite:///{tmp_path}/table.db",
        "hub": f"hub:{copied}/eu",
    }[source]
    assert main(["verify", address]) == 0
    assert terminal.lines() == [f"verifying [{'█' * 30}] 2,500 of 2,500 events", ""]
    assert f"[{'█' * 12:<30}] 1,000 of 2,500 events" in terminal.getvalue()


def test_what_is_said_of_damage_begins_a_line_of_its_own(copied: str, tmp_path: Path, terminal: Terminal) -> None:
    damaged = sorted((tmp_path / "objects").rglob("*.jsonl"))[6]
    damaged.write_bytes(damaged.read_bytes().replace(b'"file"', b'"fila"', 1))
    assert main(["verify", f"file://{tmp_path}/objects"]) == 1
    assert terminal.lines() == [f"verifying [{'█' * 12:<30}] 1,000 of 2,500 events", ""]


def test_rebuilding_from_a_queue_shows_its_last_bar_once(copied: str, tmp_path: Path, terminal: Terminal) -> None:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        rebuild(queue, f"sqlite:///{tmp_path}/rebuilt.db").close()
    assert terminal.lines() == [f"rebuilding [{'█' * 30}] 2,500 of 2,500 events", ""]


def test_a_log_that_goes_on_meanwhile_is_shown_on_the_same_line(terminal: Terminal) -> None:
    bar = Bar("rebuilding")
    for number, goal in ((500, 1_000), (1_000, 1_000), (1_500, 1_500), (1_500, 1_500)):
        bar(number, goal)
    bar.end()
    assert terminal.lines() == [f"rebuilding [{'█' * 30}] 1,500 of 1,500 events", ""]


def test_without_a_goal_it_counts(terminal: Terminal) -> None:
    bar = Bar("verifying")
    bar(1_000, None)
    bar(2_000, None)
    assert terminal.lines() == ["verifying 2,000 events"]
    bar.end()
    bar.end()
    assert terminal.lines() == ["verifying 2,000 events", ""]
