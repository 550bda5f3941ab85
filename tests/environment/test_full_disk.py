"""A full disk under each of the log's copies: what was acknowledged stays, nothing half-written is read, and once there
is room again it goes on by itself, with every event exactly once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.errors import StoreFull
from lease_core.recovery import Standby, verify
from lease_core.replication import (
    Backoff,
    HubServer,
    HubSink,
    JsonlSink,
    ObjectStoreSink,
    RefusedEvents,
    Relay,
    Rules,
    SinkStatus,
    SinkUnavailable,
    SqlSink,
    each_event,
    follow_hub,
    read_hub,
    read_jsonl,
    read_segments,
    read_sql,
)
from tests.environment.tiny_disk import Ballast, on_a_tiny_disk
from tests.kills import audit
from tests.recovery.histories import same
from tests.replication.conftest import work

RULES = Rules(batch_size=50, linger=0.0, checkpoint_every=0.0, backoff=Backoff(0.02, 0.2))
Copies = dict[str, Callable[[], list[object]]]


def until(condition: Callable[[], bool], shown: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.01)


def check_prefixes(copies: Copies, relay: Relay, queue: LeaseQueue) -> None:
    """What a copy gives is the beginning of the log, and holds whatever its sink has acknowledged."""
    log = list(each_event(queue))
    for status in relay.status():
        held = copies[status.name]()
        assert held == log[: len(held)], status
        assert len(held) >= (status.position or 0), status


def says_what_to_do(status: SinkStatus) -> bool:
    """To be asked of one look at all: a sink that tries again may get something small into what room is left."""
    said = str(status.error)
    return status.state == "retrying" and "no space is left" in said and "free some" in said


def check_filled(relay: Relay, queue: LeaseQueue, ballast: Ballast, copies: Copies, leave: int) -> None:
    """Fill the disk up, see every sink say so, then make room and see every sink with everything."""
    work(queue, 100)
    assert relay.wait_until(queue.stats().head, 60), relay.status()
    ballast.fill(leave)
    until(lambda: bool(work(queue, 100)) and all(map(says_what_to_do, relay.status())), relay.status)
    check_prefixes(copies, relay, queue)
    ballast.release()
    head = queue.stats().head
    assert relay.wait_until(head, 60), relay.status()
    assert [each.state for each in relay.status()] == ["running"] * len(copies)
    log = list(each_event(queue))
    for name, copy in copies.items():
        assert copy() == log, name


def relay_to_files(disk: Path, folder: Path) -> None:
    """Several times over, and each time at another byte of a batch."""
    files, objects, database = disk / "files", f"file://{disk}/objects", f"sqlite:///{disk}/copy.db"
    sinks = [JsonlSink(files, max_bytes=60_000), ObjectStoreSink(objects), SqlSink(database)]
    copies: Copies = {
        "jsonl": lambda: list(read_jsonl(files).read()),  # not strictly: a batch may be on its way again
        "objects": lambda: list(read_segments(objects).read()),
        "sql": lambda: list(read_sql(database, "resourcelease").read()),
    }
    with LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue:
        relay = Relay(queue, sinks, rules=RULES, interval=0.01)
        with relay:
            for leave in (0, 12_288, 40_960):
                check_filled(relay, queue, Ballast(disk), copies, leave)
        assert not list(disk.rglob("*.torn")), "what did not fit is not evidence of anything"
        assert list(read_jsonl(files).read(strict=True)) == list(each_event(queue))
        assert verify(read_jsonl(files), queue).ok


def relay_of_a_queue_on_it(disk: Path, folder: Path) -> None:
    """The queue's own disk is full: what it holds is delivered all the same, and checkpoints are kept later."""
    files = folder / "files"
    with LeaseQueue.open(f"sqlite:///{disk}/queue.db") as queue:
        head = work(queue, 500)
        ballast = Ballast(disk)
        ballast.fill()
        with pytest.raises(StoreFull, match="free space"):
            work(queue, 2_000)
        audit.check_queue(queue)
        with Relay(queue, JsonlSink(files), rules=RULES, interval=0.01) as relay:
            until(lambda: "StoreFull" in str(relay.status()[0].error), relay.status)
            ballast.release()
            assert relay.wait_until(head, 60), relay.status()
            work(queue, 100)
            assert relay.wait_until(queue.stats().head, 60), relay.status()
            ballast.fill()
        assert list(read_jsonl(files).read(strict=True)) == list(each_event(queue))
        ballast.release()
        with Relay(queue, JsonlSink(files), rules=RULES) as relay:
            until(lambda: set(queue.readers().values()) == {queue.stats().head}, queue.readers)
            assert relay.status()[0].delivered == 0


def hub(disk: Path, folder: Path) -> None:
    with (
        HubServer(f"sqlite:///{disk}/hub.db", "127.0.0.1:0") as server,
        LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue,
    ):
        address = f"127.0.0.1:{server.port}"
        copies: Copies = {"hub": lambda: list(read_hub(address, "a").read())}
        with Relay(queue, HubSink(address, source="a"), rules=RULES, interval=0.01) as relay:
            for leave in (0, 100_000):
                check_filled(relay, queue, Ballast(disk), copies, leave)
        merged = [each.position for each in follow_hub(address).events(once=True)]
        assert merged == list(range(1, queue.stats().head + 1))


def standby(disk: Path, folder: Path) -> None:
    with (
        LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue,
        Standby(queue, f"sqlite:///{disk}/copy.db", interval=0.02) as standby,
    ):
        work(queue, 100)
        standby.start()
        until(lambda: standby.lag() == 0, lambda: standby.trouble)
        ballast = Ballast(disk)
        ballast.fill(leave=40_960)
        until(lambda: bool(work(queue, 100)) and isinstance(standby.trouble, StoreFull), lambda: standby.trouble)
        assert "free space" in str(standby.trouble)
        with LeaseQueue.open(f"sqlite:///{disk}/copy.db") as copy:
            held = list(each_event(copy))
        assert held == list(each_event(queue))[: len(held)]
        assert len(held) >= standby.number > 0
        ballast.release()
        until(lambda: standby.lag() == 0 and standby.trouble is None, lambda: standby.trouble)
        with standby.promote(queue) as promoted:
            same(queue, promoted)
            work(promoted, 10)
            audit.check_queue(promoted)


def committer(disk: Path, folder: Path) -> None:
    """First no room for the table's files, then none for the catalog."""
    from omnirelay_dagster.iceberg import IcebergTable
    from tests.iceberg.lake import ASSET, Lake, expected, numbered, pairs

    for name, catalog, warehouse in (("files", folder, disk), ("catalog", disk, folder)):
        home = folder / name
        home.mkdir()
        lake = Lake(home, f"sqlite:///{catalog}/{name}.db")
        table = IcebergTable("lake.orders", lake.catalog_url, warehouse / f"lake-{name}")
        ballast = Ballast(disk)
        for batch in range(5):
            lake.publish(numbered(batch))
            if batch % 2 == 0:
                table.commit_published(lake.fenced, ASSET)
                continue
            ballast.fill()
            with pytest.raises(StoreFull, match="free space, and call it again"):
                table.commit_published(lake.fenced, ASSET)
            assert pairs(table) == expected(batch)
            ballast.release()
            report = table.commit_published(lake.fenced, ASSET)
            assert (report.batches, report.total_rows) == (1, 3 * (batch + 1))
            assert table.commit_published(lake.fenced, ASSET).batches == 0
        assert pairs(table) == expected(5)
        lake.close()


def refused(disk: Path, folder: Path) -> None:
    """A record that was cut off by a full disk is not joined to the one that comes after it."""
    with LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue:
        work(queue, 10)
        events = list(each_event(queue))
    record, ballast = RefusedEvents(disk / "refused.jsonl"), Ballast(disk)
    record.add("sink", "first", events[0])
    ballast.fill()
    for event in events[1:]:
        with pytest.raises(SinkUnavailable, match="free some"):
            record.add("sink", "x" * 10_000, event)
        ballast.release()
        record.add("sink", "kept", event)
        ballast.fill()
    kept = [each.event for each in record if each.reason == "kept"]
    assert kept == events[1:]


SCENARIOS = {each.__name__: each for each in (relay_to_files, relay_of_a_queue_on_it, hub, standby, committer, refused)}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a file system of its own")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_full_disk_loses_nothing_and_doubles_nothing(scenario: str, tmp_path: Path) -> None:
    size = "64m" if scenario == "hub" else "4m"  # its pages are large, and so is its write-ahead log
    on_a_tiny_disk("tests.environment.test_full_disk", scenario, tmp_path, size)


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
