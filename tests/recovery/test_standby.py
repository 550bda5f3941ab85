"""A standby takes over without losing anything, and there are never two primaries."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import EventsPruned, InvalidInput, LeaseError, QueueSealed
from lease_core.recovery import Standby, verify
from lease_core.replication import HistoryDiffers, MemorySink, Relay
from tests.conformance.clock import FakeClock
from tests.kills.forks import KILLED, kill, running, start
from tests.recovery.histories import config, events, live, same


def test_it_follows_and_takes_over(original: LeaseQueue, url: str, clock: FakeClock) -> None:
    with Standby(original, url, config=config(), clock=clock) as standby:
        while standby.follow(limit=50):
            pass
        assert (standby.number, standby.lag()) == (original.stats().head, 0)
        live(original, clock, seed=11, steps=30)
        with standby.promote(original) as queue:
            same(original, queue)
            queue.enqueue(WorkItem("file", "after"))
            assert verify(queue, tables=queue).ok


def test_from_then_on_nobody_can_write_to_the_old_primary(
    original: LeaseQueue, url: str, tmp_path: Path, clock: FakeClock
) -> None:
    original.enqueue([WorkItem("file", name) for name in "ab"])
    [lease] = original.lease("worker")
    with Standby(original, url, config=config(), clock=clock) as standby, standby.promote(original) as queue:
        head = original.stats().head
        again = LeaseQueue.open(f"sqlite:///{tmp_path}/original.db", "main", clock=clock)
        for old in (original, again):
            for act in (
                lambda old=old: old.enqueue(WorkItem("file", "c")),
                lambda old=old: old.lease("worker"),
                lambda old=old: old.complete(lease),
                lambda old=old: old.heartbeat(lease),
                lambda old=old: old.release_owner("worker"),
                lambda old=old: old.drain(),
                lambda old=old: old.sweep(),
            ):
                with pytest.raises(QueueSealed):
                    act()
        again.close()
        assert original.stats().head == head
        queue.complete(lease).raise_if_refused()  # the holder goes on at the new primary


def test_a_primary_that_has_pruned_all_that_the_standby_has_is_followed_again(
    original: LeaseQueue, sqlite_url: str, clock: FakeClock
) -> None:
    """Its log is kept for the standby, and no longer than that; then the standby is restarted."""
    with Standby(original, sqlite_url, config=config(), clock=clock) as standby:
        while standby.follow():
            pass
    head = original.stats().head
    assert original.prune_events(before=head + 1) == head
    with Standby(original, sqlite_url, config=config(), clock=clock) as standby:
        assert standby.follow() == 0
    live(original, clock, seed=11, steps=30)
    with (
        Standby(original, sqlite_url, config=config(), clock=clock) as standby,
        standby.promote(original) as queue,
    ):
        assert queue.stats() == original.stats()


def test_one_that_has_pruned_more_than_that_is_not(original: LeaseQueue, sqlite_url: str, clock: FakeClock) -> None:
    with Standby(original, sqlite_url, config=config(), clock=clock) as standby:
        standby.follow(limit=50)
        original.drop_reader(f"standby/{standby.name}")
    original.prune_events(before=100)
    with pytest.raises(EventsPruned):
        Standby(original, sqlite_url, config=config(), clock=clock)


def test_who_still_follows_into_a_copy_that_took_over_is_refused(url: str, tmp_path: Path) -> None:
    """The primary was thought to be lost and lives on, and so does the process that followed it."""
    with (
        LeaseQueue.open(f"sqlite:///{tmp_path}/old.db", "main") as old,
        Standby(old, url) as follower,
    ):
        old.enqueue(WorkItem("file", "both have it"))
        follower.follow()
        other = Standby(None, url, namespace="main")
        with other.promote(primary_is_lost=True) as new:
            for _ in range(2):
                old.enqueue(WorkItem("file", "at the old one"))
            with pytest.raises(HistoryDiffers):  # as long as the new one has done nothing yet
                follower.follow(limit=1)
            new.enqueue(WorkItem("file", "at the new one"))
            with pytest.raises(HistoryDiffers):
                follower.follow()
            assert [event.item.resource_id for event in new.events() if event.item] == [
                "both have it",
                "at the new one",
            ]


def test_two_processes_may_follow_into_one_copy(original: LeaseQueue, url: str, clock: FakeClock) -> None:
    """As when one is to take over while the other still follows. Each may find half of its page there already."""
    chance = random.Random(7)
    told = MemorySink()
    Relay(original, told).run_once()
    with (
        Standby(told, url, namespace="main", config=config(), clock=clock) as one,
        Standby(told, url, namespace="main", config=config(), clock=clock) as other,
    ):
        head = original.stats().head
        while max(one.number, other.number) < head:
            chance.choice([one, other]).follow(limit=chance.randrange(1, 30))
        with other.promote(original) as queue:
            same(original, queue)


def test_one_whose_place_was_dropped_takes_it_again(original: LeaseQueue, sqlite_url: str, clock: FakeClock) -> None:
    with Standby(original, sqlite_url, config=config(), clock=clock) as standby:
        standby.follow(limit=50)
        original.drop_reader(f"standby/{standby.name}")
        while standby.follow():
            pass
        assert original.readers() == {f"standby/{standby.name}": original.stats().head}


def test_a_queue_that_it_is_no_copy_of_is_not_sealed(original: LeaseQueue, sqlite_url: str, clock: FakeClock) -> None:
    with (
        LeaseQueue.open("sqlite://", "main", config(), clock=clock) as another,
        Standby(original, sqlite_url, config=config(), clock=clock) as standby,
    ):
        standby.follow(limit=50)
        another.enqueue([WorkItem("other", str(n)) for n in range(100)])
        with pytest.raises(HistoryDiffers):
            standby.promote(another)
        assert len(another.lease("worker", limit=3)) == 3
        with standby.promote(original) as queue:
            same(original, queue)


def test_a_primary_that_has_pruned_what_is_missing_is_not_sealed(
    original: LeaseQueue, sqlite_url: str, clock: FakeClock
) -> None:
    """The copy could not be brought up to it, so that there would be no primary at all."""
    told = MemorySink()
    Relay(original, told).run_once()
    with Standby(told, sqlite_url, namespace="main", config=config(), clock=clock) as standby:
        standby.follow(limit=50)
        original.prune_events(before=100)
        with pytest.raises(EventsPruned):
            standby.promote(original)
        original.enqueue(WorkItem("file", "still works"))
        while standby.follow():
            pass
        with standby.promote(original) as queue:
            assert queue.stats().head == original.stats().head


def test_who_waits_at_the_old_primary_hears_of_it(url: str, tmp_path: Path) -> None:
    with (
        LeaseQueue.open(f"sqlite:///{tmp_path}/original.db", "main") as original,
        ThreadPoolExecutor(1) as pool,
        Standby(original, url) as standby,
    ):
        waiting = pool.submit(original.lease, "worker", wait=60)
        time.sleep(0.1)
        with standby.promote(original), pytest.raises(QueueSealed):
            waiting.result(timeout=20)


def test_of_two_standbys_one_wins(original: LeaseQueue, tmp_path: Path, clock: FakeClock) -> None:
    standbys = [Standby(original, f"sqlite:///{tmp_path}/{n}.db", config=config(), clock=clock) for n in range(4)]
    gate = threading.Barrier(len(standbys))

    def promote(standby: Standby) -> LeaseQueue | LeaseError:
        gate.wait()
        try:
            return standby.promote(original)
        except LeaseError as error:
            return error

    with ThreadPoolExecutor(len(standbys)) as pool:
        outcomes = list(pool.map(promote, standbys))
    winners = [outcome for outcome in outcomes if isinstance(outcome, LeaseQueue)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, QueueSealed) for outcome in outcomes) == len(standbys) - 1
    same(original, winners[0])
    winners[0].close()
    for standby in standbys:
        standby.close()


def test_a_promotion_that_died_half_way_is_finished_by_the_same_standby_only(
    original: LeaseQueue, tmp_path: Path, clock: FakeClock
) -> None:
    mine, theirs = f"sqlite:///{tmp_path}/mine.db", f"sqlite:///{tmp_path}/theirs.db"
    with Standby(original, mine, config=config(), clock=clock) as standby:
        standby.follow(limit=20)
        standby.seal(original)  # and then it is killed
    with Standby(original, theirs, config=config(), clock=clock) as other, pytest.raises(QueueSealed, match="another"):
        other.promote(original)
    with Standby(original, mine, config=config(), clock=clock) as standby, standby.promote(original) as queue:
        same(original, queue)


def test_a_lost_primary_must_be_declared_lost(original: LeaseQueue, sqlite_url: str, clock: FakeClock) -> None:
    with Standby(original, sqlite_url, config=config(), clock=clock) as standby:
        standby.follow()
        with pytest.raises(InvalidInput, match="primary_is_lost"):
            standby.promote()
        with standby.promote(primary_is_lost=True) as queue:
            queue.enqueue(WorkItem("file", "after"))
            with pytest.raises(QueueSealed):  # it was not so lost that it could not be sealed
                original.enqueue(WorkItem("file", "never"))


def test_a_primary_that_another_has_taken_over_from_is_not_lost(
    original: LeaseQueue, tmp_path: Path, clock: FakeClock
) -> None:
    """Said to be lost, it still says who its successor is; to go on would make two that grant."""
    urls = [f"sqlite:///{tmp_path}/{n}.db" for n in range(2)]
    winner, other = (Standby(original, url, config=config(), clock=clock) for url in urls)
    with winner, other, winner.promote(original), pytest.raises(QueueSealed, match="another"):
        other.promote(primary_is_lost=True)


def test_the_log_is_kept_until_the_standby_has_it(original: LeaseQueue, sqlite_url: str, clock: FakeClock) -> None:
    with Standby(original, sqlite_url, config=config(), clock=clock) as standby:
        standby.follow(limit=50)
        assert original.prune_events(before=10_000) <= 50
        standby.follow()
        assert standby.lag() == 0


def _follow(original: str, url: str) -> None:
    with LeaseQueue.open(original, "main") as source, Standby(source, url) as standby:
        while True:
            if not standby.follow(limit=40):
                time.sleep(0.005)


def _work(original: str) -> None:
    with LeaseQueue.open(original, "main") as queue:
        while True:
            queue.enqueue([WorkItem("file", str(n)) for n in range(20)])
            leases = queue.lease("worker", limit=15)
            queue.complete(leases[:10], result={"ok": True})
            queue.fail(leases[10:], "no luck", delay=0)


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("kills", "least"), [(6, 1), pytest.param(40, 100_000, id="a hundred thousand events", marks=pytest.mark.slow)]
)
def test_a_standby_killed_at_random_under_load_misses_nothing(kills: int, least: int, url: str, tmp_path: Path) -> None:
    original = f"sqlite:///{tmp_path}/original.db"
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    with LeaseQueue.open(original, "main") as primary:
        with running(_work, original):
            while kills > 0 or primary.stats().head < least:
                process = start(_follow, original, url)
                time.sleep(chance.uniform(0.3, 1.0))
                kill(process)
                assert process.exitcode == KILLED, f"seed {seed}"
                kills -= 1
        with Standby(primary, url) as standby, standby.promote(primary) as queue:
            assert queue.stats().head >= least
            assert events(queue) == events(primary), f"seed {seed}"
            assert verify(queue, primary, tables=queue).ok, f"seed {seed}"
