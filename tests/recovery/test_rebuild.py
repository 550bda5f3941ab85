"""A queue made from a copy of its log is the queue."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import InvalidInput
from lease_core.recovery import Standby, rebuild, verify
from lease_core.replay import ReplayDiverged, replay
from lease_core.replication import (
    HistoryDiffers,
    HubServer,
    HubSink,
    JsonlSink,
    MemorySink,
    ObjectStoreSink,
    Relay,
    SqlSink,
    read_hub,
    read_jsonl,
    read_segments,
    read_sql,
    with_shard,
)
from tests.conformance.clock import MICRO, FakeClock
from tests.kills.forks import KILLED, start
from tests.recovery.histories import config, events, live, same

EXCLUSIVE = pytest.mark.parametrize("exclusive", [None, "resource", "partition"])


@EXCLUSIVE
@pytest.mark.parametrize("retention", [5, 600])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_original_row_for_row(seed: int, retention: int, exclusive: str | None, clock: FakeClock) -> None:
    _live_and_rebuild(seed, config(exclusive, retention=retention), clock)


@pytest.mark.slow
@EXCLUSIVE
def test_it_is_the_original_in_hundreds_of_lives(exclusive: str | None) -> None:
    for seed in range(200):
        _live_and_rebuild(seed, config(exclusive, retention=(1, 5, 60, 600)[seed % 4]), FakeClock(), steps=300)


def _live_and_rebuild(seed: int, rules: QueueConfig, clock: FakeClock, steps: int = 120) -> None:
    """What is forgotten early comes again while the copy still knows it; what is kept long does not."""
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        live(original, clock, seed, steps)
        with rebuild(original, "sqlite://", config=rules, clock=clock) as copy:
            same(original, copy)
            if rules.exclusive is None:
                _go_on_alike(original, copy)
            else:
                clock.advance(3_600)  # leases end, and delays
                _go_on_by_key(copy, rules.exclusive)


def _go_on_by_key(copy: LeaseQueue, exclusive: str) -> None:
    """Never two of a key at once, and all of them in the end."""
    while leases := copy.lease("next", limit=100):
        items = [lease.item for lease in leases if exclusive == "resource" or lease.item.partition_key is not None]
        keys = [(i.resource_type, i.resource_id) if exclusive == "resource" else i.partition_key for i in items]
        assert len(keys) == len(set(keys))
        copy.complete(leases).raise_if_refused()
    assert copy.stats().pending == 0


def _go_on_alike(original: LeaseQueue, copy: LeaseQueue) -> None:
    """The same items in the same order to whoever asks, until there are none."""
    while leases := original.lease("next", limit=7):
        theirs = copy.lease("next", limit=7)
        assert [lease.item for lease in theirs] == [lease.item for lease in leases]
        assert [lease.token.fence for lease in theirs] == [lease.token.fence for lease in leases]
        original.complete(leases).raise_if_refused()
        copy.complete(theirs).raise_if_refused()
    assert copy.lease("next") == []


class Paged:
    """A source that gives a few events at a time, which are then put together from events, not from stored rows."""

    namespace = "main"

    def __init__(self, source: LeaseQueue, size: Callable[[], int]) -> None:
        self._source, self._size = source, size

    def events(self, after: int, limit: int) -> Any:
        return self._source.events(after, min(limit, self._size()))


@EXCLUSIVE
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_original_from_pages_of_any_size(seed: int, exclusive: str | None, clock: FakeClock) -> None:
    rules = config(exclusive, retention=30)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        live(original, clock, seed)
        paged = Paged(original, partial(random.Random(seed).randrange, 1, 31))
        with rebuild(paged, "sqlite://", config=rules, clock=clock) as copy:
            same(original, copy)


@pytest.mark.parametrize("exclusive", ["resource", "partition"])
def test_items_that_came_back_together_each_have_their_place_by_key(exclusive: str, clock: FakeClock) -> None:
    """Drained they are one span, and their return, put together from events, is one entry."""
    rules = config(exclusive)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        original.enqueue([WorkItem("file", name, partition_key=name) for name in "abcd"])
        original.restore(original.drain(limit=3))
        with rebuild(Paged(original, lambda: 7), "sqlite://", config=rules, clock=clock) as copy:
            same(original, copy)
            assert len(copy.lease("worker", limit=10)) == 4


def test_a_request_that_came_again_after_it_was_forgotten(url: str, clock: FakeClock) -> None:
    """All of it in one page of the log: finished, restored, finished, forgotten, asked for again."""
    rules = config(retention=60)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        original.enqueue([WorkItem("file", name, request_id=name) for name in ("plain", "bad", "travels")])
        original.fail(original.lease("worker", limit=2)[1], "hopeless", requeue=False)
        [travelling] = original.drain(limit=1)
        original.purge_dead([2])  # from here on the copy writes in another transaction
        original.restore([travelling])
        clock.advance(31)
        original.complete(original.lease("worker", limit=2)).raise_if_refused()
        clock.advance(61)
        original.sweep()
        again = original.enqueue([WorkItem("file", name, request_id=name) for name in ("plain", "bad", "travels")])
        assert not any(receipt.duplicate for receipt in again)
        with rebuild(original, url, config=rules, clock=clock) as copy:
            same(original, copy)
            assert all(r.duplicate for r in copy.enqueue([WorkItem("file", "plain", request_id="plain")]))


def test_an_item_that_came_again_from_elsewhere_after_it_was_forgotten(url: str, clock: FakeClock) -> None:
    rules = config(retention=60)
    with (
        LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original,
        LeaseQueue.open("sqlite://", "elsewhere", clock=clock) as elsewhere,
    ):
        elsewhere.enqueue(WorkItem("file", "a", request_id="a"))  # by which it is known where it was before
        for _ in range(3):  # here, drained to where it came from, forgotten here, and here again
            original.restore(elsewhere.drain(limit=1))
            elsewhere.restore(original.drain(limit=1))
            clock.advance(61)
            original.sweep()
        original.restore(elsewhere.drain(limit=1))
        with rebuild(original, url, config=rules, clock=clock) as copy:
            same(original, copy)


def test_an_item_that_came_again_from_a_drain_after_it_was_completed_and_forgotten(url: str, clock: FakeClock) -> None:
    rules = config(retention=60)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        original.enqueue([WorkItem("file", name) for name in "abc"])
        taken = original.drain()
        original.restore(taken)
        original.complete(original.lease("worker", limit=2)).raise_if_refused()
        clock.advance(61)
        original.sweep()
        assert [receipt.duplicate for receipt in original.restore(taken)] == [False, False, True]
        with rebuild(original, url, config=rules, clock=clock) as copy:
            same(original, copy)


def test_an_item_whose_place_of_origin_was_forgotten_with_it(url: str, clock: FakeClock) -> None:
    """It came from elsewhere, went, was forgotten, and came back from its own drain: as what it was when it came, it
    may then come once more."""
    rules = config(retention=60)
    with (
        LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original,
        LeaseQueue.open("sqlite://", "elsewhere", clock=clock) as elsewhere,
    ):
        original.enqueue(WorkItem("file", "first"))  # so that the guest gets another id than it had
        elsewhere.enqueue(WorkItem("file", "guest"))
        guest = elsewhere.drain()
        original.restore(guest)
        original.complete(original.lease("worker")).raise_if_refused()
        own = original.drain()
        clock.advance(61)
        original.sweep()
        for again in (own, guest):
            assert [receipt.duplicate for receipt in original.restore(again)] == [False]
            original.enqueue(WorkItem("file", "between"))  # so that the copy takes them in one after the other
        with rebuild(original, url, config=rules, clock=clock) as copy:
            same(original, copy)


def test_a_request_that_came_again_at_once(clock: FakeClock) -> None:
    rules = config(retention=0)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        for _ in range(4):
            [receipt] = original.enqueue([WorkItem("file", "a", request_id="a")])
            assert not receipt.duplicate
            original.complete(original.lease("worker")).raise_if_refused()
            clock.advance(MICRO)
            original.sweep()
        with rebuild(original, "sqlite://", config=rules, clock=clock) as copy:
            same(original, copy)


class Mixed:
    """The first event of one queue, and then what follows the first event of another."""

    namespace = "main"

    def __init__(self, first: LeaseQueue, rest: LeaseQueue) -> None:
        self._told = [*first.events(limit=1), *rest.events(1)]

    def events(self, after: int, limit: int) -> Any:
        return self._told[after:][:limit]


@pytest.mark.parametrize(("later", "problem"), [(0, "twice at one moment"), (1, "not finished")])
def test_a_request_that_is_held_is_not_given_again(later: int, problem: str, sqlite_url: str, clock: FakeClock) -> None:
    request = WorkItem("file", "a", request_id="a")
    with LeaseQueue.open("sqlite://", "main", clock=clock) as one, LeaseQueue.open("sqlite://", clock=clock) as two:
        one.enqueue(request)
        clock.advance(later)
        two.enqueue([WorkItem("file", "b"), request])
        with pytest.raises(ReplayDiverged, match=problem):
            rebuild(Mixed(one, two), sqlite_url, clock=clock)


def test_on_either_database(original: LeaseQueue, url: str, clock: FakeClock) -> None:
    with rebuild(original, url, config=config(), clock=clock) as copy:
        same(original, copy)
        _go_on_alike(original, copy)


def test_from_postgresql(postgres_url: str, sqlite_url: str, clock: FakeClock) -> None:
    with LeaseQueue.open(postgres_url, "main", config(), auto_migrate=True, clock=clock) as original:
        live(original, clock, seed=3)
        with rebuild(original, sqlite_url, config=config(), clock=clock) as copy:
            same(original, copy)


def test_from_every_kind_of_copy(original: LeaseQueue, tmp_path: Path, clock: FakeClock) -> None:
    memory = MemorySink()
    objects = f"file://{tmp_path}/objects"
    table = f"sqlite:///{tmp_path}/table.db"
    sinks: list[Any] = [memory, JsonlSink(tmp_path / "lines"), ObjectStoreSink(objects), SqlSink(table)]
    Relay(original, sinks).run_once()
    copies = [memory, read_jsonl(tmp_path / "lines"), read_segments(objects, "main"), read_sql(table, "main")]
    for at, copy in enumerate(copies):
        with rebuild(copy, f"sqlite:///{tmp_path}/{at}.db", namespace="main", config=config(), clock=clock) as queue:
            same(original, queue)


def test_from_a_copy_that_is_tagged_with_a_shard(original: LeaseQueue, tmp_path: Path, clock: FakeClock) -> None:
    """The tag is the copy's: the queue's own log has none, and is the same with or without it."""
    Relay(original, with_shard(JsonlSink(tmp_path / "lines"), "eu-1")).run_once()
    copy = read_jsonl(tmp_path / "lines")
    assert {event.metadata["shard.id"] for event in events(copy)} == {"eu-1"}
    assert verify(copy, original, tables=original).ok
    assert verify(original, copy).ok
    with rebuild(copy, f"sqlite:///{tmp_path}/rebuilt.db", config=config(), clock=clock) as queue:
        same(original, queue)


def test_a_standby_of_a_tagged_copy_takes_over_from_the_queue(
    original: LeaseQueue, tmp_path: Path, clock: FakeClock
) -> None:
    Relay(original, with_shard(JsonlSink(tmp_path / "lines"), "eu-1")).run_once()
    place = f"sqlite:///{tmp_path}/standby.db"
    for _ in range(2):  # the second goes on with what the first has made
        with Standby(read_jsonl(tmp_path / "lines"), place, config=config(), clock=clock) as standby:
            standby.follow(limit=50)
    live(original, clock, seed=11, steps=30)
    with (
        Standby(read_jsonl(tmp_path / "lines"), place, config=config(), clock=clock) as standby,
        standby.promote(original) as queue,
    ):
        same(original, queue)


def test_from_a_hub(original: LeaseQueue, tmp_path: Path, clock: FakeClock) -> None:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0") as hub:
        address = f"127.0.0.1:{hub.port}"
        Relay(original, HubSink(address, source="here")).run_once()
        copy = read_hub(address, "here", "main")
        with rebuild(copy, f"sqlite:///{tmp_path}/copy.db", config=config(), clock=clock) as queue:
            same(original, queue)


def test_as_of_any_number(original: LeaseQueue, clock: FakeClock) -> None:
    told = events(original)
    for upto in range(0, len(told), 37):
        with rebuild(original, "sqlite://", upto=upto, config=config(), clock=clock) as copy:
            replica = replay(told[:upto])
            stats = copy.stats()
            assert (stats.head, stats.pending, stats.active) == (upto, replica.pending, replica.active)
            assert events(copy) == told[:upto]


def test_leases_are_kept_or_handed_back_as_asked(clock: FakeClock) -> None:
    with LeaseQueue.open("sqlite://", clock=clock) as original:
        original.enqueue([WorkItem("file", name) for name in "abc"])
        leases = original.lease("worker", limit=2)
        with rebuild(original, "sqlite://", clock=clock) as copy:
            copy.complete(leases[0]).raise_if_refused()
        with rebuild(original, "sqlite://", leases="release", clock=clock) as copy:
            assert copy.stats().active == 0
            assert [status.attempt for status in copy.inspect([1, 2])] == [0, 0]
            assert len(copy.lease("other", limit=3)) == 3


def test_leases_that_ran_out_before_the_rebuild_are_handed_back_too(url: str, clock: FakeClock) -> None:
    """Nobody could prolong them while there was no queue, so that they ran out burns no attempt."""
    rules = config(max_attempts=1)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as original:
        original.enqueue([WorkItem("file", str(n)) for n in range(700)])
        for n in range(600):
            original.lease(f"worker-{n % 3}", duration=30 + n % 7)
        clock.advance(33)
        with rebuild(original, url, config=rules, leases="release", clock=clock) as copy:
            assert (copy.stats().active, copy.stats().pending) == (0, 700)
            assert {status.attempt for status in copy.inspect(range(1, 701))} == {0}
            assert verify(copy, tables=copy).ok
            assert len(copy.lease("other", limit=1_000)) == 700


def test_rules_are_those_of_the_queue_that_is_copied(sqlite_url: str) -> None:
    rules = QueueConfig(high_watermark=3, capacity=10, exclusive="resource")
    with LeaseQueue.open("sqlite://", config=rules) as original:
        original.enqueue([WorkItem("file", name) for name in "aaa"])
        with rebuild(original, sqlite_url) as copy:
            assert copy.stats().backpressure
            assert len(copy.lease("worker", limit=3)) == 1


class Interrupted:
    """A source that fails after so many events."""

    namespace = "main"

    def __init__(self, source: LeaseQueue, after: int) -> None:
        self._source, self._after = source, after

    def events(self, after: int, limit: int) -> Any:
        if after >= self._after:
            raise ConnectionError("gone")
        return self._source.events(after, min(limit, 20))


def test_an_interrupted_rebuild_goes_on_where_it_was(original: LeaseQueue, url: str, clock: FakeClock) -> None:
    with pytest.raises(ConnectionError):
        rebuild(Interrupted(original, 100), url, config=config(), clock=clock)
    with rebuild(original, url, config=config(), clock=clock) as copy:
        same(original, copy)


def _rebuild_and_die(original: str, url: str, after: int) -> None:
    source = LeaseQueue.open(original, "main", config())

    class Dies:
        namespace = "main"

        def events(self, at: int, limit: int) -> Any:
            if at >= after:
                os.kill(os.getpid(), signal.SIGKILL)
            return source.events(at, 50)

    rebuild(Dies(), url, config=config())


def test_a_killed_rebuild_goes_on_where_it_was(
    original: LeaseQueue, url: str, tmp_path: Path, clock: FakeClock
) -> None:
    for after in (50, 100, 200):
        process = start(_rebuild_and_die, f"sqlite:///{tmp_path}/original.db", url, after)
        process.join(60)
        assert process.exitcode == KILLED
    with rebuild(original, url, config=config(), clock=clock) as copy:
        same(original, copy)


def test_a_copy_that_has_more_than_is_asked_for_is_not_taken_for_it(original: LeaseQueue, sqlite_url: str) -> None:
    with pytest.raises(ConnectionError):
        rebuild(Interrupted(original, 100), sqlite_url, config=config())
    with pytest.raises(InvalidInput, match="upto: is 50, but the copy there holds events up to 100"):
        rebuild(original, sqlite_url, upto=50, config=config())
    with rebuild(original, sqlite_url, upto=110, config=config()) as copy:
        assert copy.stats().head == 110


def test_a_copy_under_another_name_goes_on_where_it_was(original: LeaseQueue, sqlite_url: str) -> None:
    with pytest.raises(ConnectionError):
        rebuild(Interrupted(original, 100), sqlite_url, namespace="another", config=config())
    with rebuild(original, sqlite_url, namespace="another", config=config()) as copy:
        assert (copy.namespace, copy.stats().head) == ("another", original.stats().head)


def test_a_half_made_copy_takes_no_work(original: LeaseQueue, sqlite_url: str) -> None:
    with pytest.raises(ConnectionError):
        rebuild(Interrupted(original, 100), sqlite_url, config=config())
    with (
        LeaseQueue.open(sqlite_url, "main") as half,
        pytest.raises(Exception, match="sealed") as refused,
    ):
        half.lease("worker")
    assert getattr(refused.value, "code", "") == "resourcelease.queue_sealed"


def test_another_history_is_not_mixed_in(original: LeaseQueue, sqlite_url: str) -> None:
    with pytest.raises(ConnectionError):
        rebuild(Interrupted(original, 100), sqlite_url, config=config())
    with LeaseQueue.open("sqlite://", "main") as other:
        other.enqueue([WorkItem("other", str(n)) for n in range(200)])
        with pytest.raises(HistoryDiffers):
            rebuild(other, sqlite_url)


def test_a_queue_is_never_overwritten(original: LeaseQueue, sqlite_url: str) -> None:
    with LeaseQueue.open(sqlite_url, "main") as present:
        present.enqueue(WorkItem("file", "precious"))
        with pytest.raises(InvalidInput, match="another database or namespace"):
            rebuild(original, sqlite_url)
        assert present.stats().pending == 1


def test_an_event_that_cannot_have_happened_stops_it(original: LeaseQueue, sqlite_url: str) -> None:
    told = events(original)
    granted = next(i for i, event in enumerate(told) if event.type == "LeaseGranted")
    swapped = [*told[:granted], *told[granted + 1 :]]

    class Bad:
        namespace = "main"

        def events(self, after: int, limit: int) -> Any:
            return [event for event in swapped if event.sequence_number > after][:limit]

    with pytest.raises(ReplayDiverged) as found:
        rebuild(Bad(), sqlite_url, config=config())
    assert found.value.sequence_number == granted + 2
    assert "missing" in found.value.problem


def test_nothing_is_not_taken_for_a_queue(sqlite_url: str) -> None:
    with pytest.raises(InvalidInput, match="is it the right one"):
        rebuild(MemorySink(), sqlite_url, namespace="main")


@pytest.mark.parametrize(
    ("what", "field"), [({"upto": -1}, "upto"), ({"leases": "drop"}, "leases"), ({"upto": 10**6}, "upto")]
)
def test_bad_input_names_the_field(what: dict[str, Any], field: str, original: LeaseQueue, sqlite_url: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        rebuild(original, sqlite_url, config=config(), **what)
