"""What a queue keeps beside its log goes with it: where its readers are, and which effects have happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.recovery import Standby, rebuild, snapshot
from lease_core.replication import Batch, MemorySink, Relay

CONFIG = QueueConfig(retry_delay=0)


class Endpoint:
    """A sink that knows nothing of where it is."""

    name = "endpoint"

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def deliver(self, batch: Batch) -> None:
        self.numbers += batch.numbers


def _used(url: str) -> LeaseQueue:
    """A queue of which a sink has everything, where an effect was recorded under a lease that failed then."""
    queue = LeaseQueue.open(url, "main", CONFIG)
    queue.enqueue([WorkItem("file", name) for name in "abc"])
    [lease] = queue.lease("worker", limit=1)
    assert lease.effects.run_once("charge", lambda: "charged once") == "charged once"
    queue.fail(lease, "and then it crashed")
    Relay(queue, Endpoint()).run_once()
    return queue


def _promoted(queue: LeaseQueue, url: str, folder: Path) -> LeaseQueue:
    with Standby(queue, url) as standby:
        return standby.promote(queue)


def _rebuilt(queue: LeaseQueue, url: str, folder: Path) -> LeaseQueue:
    return rebuild(queue, url)


def _from_a_snapshot(queue: LeaseQueue, url: str, folder: Path) -> LeaseQueue:
    snapshot(queue, folder / "snapshot")
    told = MemorySink()
    Relay(queue, told).run_once()
    return rebuild(told, url, snapshot=folder / "snapshot")


@pytest.mark.parametrize("again", [_promoted, _rebuilt, _from_a_snapshot])
def test_effects_do_not_run_again_and_sinks_get_nothing_twice(
    url: str, tmp_path: Path, again: Callable[[LeaseQueue, str, Path], LeaseQueue]
) -> None:
    with _used(f"sqlite:///{tmp_path}/original.db") as original, again(original, url, tmp_path) as queue:
        head = original.stats().head
        assert queue.readers()["relay/endpoint"] == head
        assert not [name for name in queue.readers() if name.startswith("standby/")]
        first, *_ = sorted(queue.lease("worker", limit=3), key=lambda lease: lease.token.sequence_id)
        assert first.effects.run_once("charge", lambda: pytest.fail("it ran again")) == "charged once"
        sink = Endpoint()
        Relay(queue, sink).run_once()
        assert sink.numbers == list(range(head + 1, queue.stats().head + 1))


def test_readers_of_a_primary_that_is_lost_are_known_to_who_followed_it(url: str, tmp_path: Path) -> None:
    with _used(f"sqlite:///{tmp_path}/original.db") as original:
        head = original.stats().head
        with Standby(original, url) as standby:
            standby.follow()
    with (
        Standby(None, url, namespace="main") as standby,
        standby.promote(primary_is_lost=True) as queue,
    ):
        assert queue.readers()["relay/endpoint"] == head


def test_a_reader_that_is_ahead_of_the_copy_is_placed_at_its_end(sqlite_url: str, tmp_path: Path) -> None:
    with (
        _used(f"sqlite:///{tmp_path}/original.db") as original,
        rebuild(original, sqlite_url, upto=2) as queue,
    ):
        assert queue.readers() == {"relay/endpoint": 2}


def test_who_rebuilds_from_what_is_only_a_log_is_told_what_it_does_not_say(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = MemorySink()
    exclusive = QueueConfig(exclusive="resource")
    with LeaseQueue.open(f"sqlite:///{tmp_path}/original.db", "main", exclusive) as queue:
        queue.enqueue([WorkItem("file", "same") for _ in range(3)])
        Relay(queue, told).run_once()
    rebuild(told, sqlite_url, namespace="main").close()
    assert "does not say whether the queue was exclusive" in caplog.text
    caplog.clear()
    with rebuild(told, f"sqlite:///{tmp_path}/second.db", namespace="main", config=exclusive) as again:
        assert len(again.lease("worker", limit=3)) == 1
    assert not caplog.text
