"""The test of the tests: bugs are planted in the real code, and each must be caught.

A bug that shows in what the queue does is caught by the simulator within a few seeds. A bug about waiting or about
real concurrency is caught by a named check with real threads. Both must be content with the code as it is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from lease_core import LeaseQueue, QueueConfig, WorkItem, entering, granting, machine, payload, retention, unit
from lease_core.errors import EventsPruned
from lease_core.log import Entry
from lease_core.machine import Claim, Complete, Heartbeat, Moved, Release, Span, State
from lease_core.store import base, postgres, selects, sqlite
from tests.simulation.driver import MEMORY, History
from tests.simulation.model import Violation
from tests.simulation.record import HistoryFailed

SEEDS = range(1, 25)
STEPS = 150

Bug = Callable[[], AbstractContextManager[Any]]
BUGS: dict[str, tuple[Bug, str | None]] = {}


def planted(exclusive: str | None = None) -> Callable[[Bug], Bug]:
    """Enter a bug into the list. ``exclusive``: the kind of queue that it needs to show."""

    def enter(bug: Bug) -> Bug:
        BUGS[bug.__name__] = (bug, exclusive)
        return bug

    return enter


def instead_of(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Replace ``owner.name`` by what ``make`` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


# Tokens and time


@planted()
def no_token_check() -> AbstractContextManager[Any]:
    """Whoever names an item may acknowledge it, whatever the token says."""

    def make(acknowledge: Any) -> Any:
        def lenient(span: Span, command: Any, now: int) -> Any:
            own = Claim(span.leased_attempt, span.lease_id or "", span.fence)
            return acknowledge(span, replace(command, claim=own), now)

        return lenient

    return instead_of(machine, "_acknowledge", make)


@planted()
def attempt_not_in_the_token_check() -> AbstractContextManager[Any]:
    """The lease id must match, but neither the attempt nor the fence."""

    def make(acknowledge: Any) -> Any:
        def lenient(span: Span, command: Any, now: int) -> Any:
            same = command.claim.lease_id == span.lease_id
            own = Claim(span.leased_attempt, span.lease_id or "", span.fence)
            return acknowledge(span, replace(command, claim=own) if same else command, now)

        return lenient

    return instead_of(machine, "_acknowledge", make)


def _deaf_to_expiry(*kinds: type) -> AbstractContextManager[Any]:
    def make(acknowledge: Any) -> Any:
        def late(span: Span, command: Any, now: int) -> Any:
            if isinstance(command, kinds) and span.expires_at is not None:
                now = min(now, span.expires_at - 1)
            return acknowledge(span, command, now)

        return late

    return instead_of(machine, "_acknowledge", make)


@planted()
def expired_lease_can_complete() -> AbstractContextManager[Any]:
    """``complete`` looks at the token only, not at the time."""
    return _deaf_to_expiry(Complete)


@planted()
def heartbeat_revives_an_expired_lease() -> AbstractContextManager[Any]:
    """As long as nobody took the item over, a late heartbeat brings the lease back."""
    return _deaf_to_expiry(Heartbeat)


@planted()
def valid_at_the_very_end() -> AbstractContextManager[Any]:
    """A lease counts as held in the very microsecond in which it ends."""

    def make(acknowledge: Any) -> Any:
        return lambda span, command, now: acknowledge(span, command, now - (now == span.expires_at))

    return instead_of(machine, "_acknowledge", make)


@planted()
@contextmanager
def early_expiry() -> Iterator[None]:
    """A lease is taken over half a second before it has run out."""
    early = 500_000

    def expire_early(expire: Any) -> Any:
        return lambda span, retry, now: expire(span, retry, max(now, min(span.expires_at or 0, now + early)))

    with (
        instead_of(granting, "expired_by", lambda find: lambda ns, now: find(ns, now + early)),
        instead_of(machine, "_expire", expire_early),
    ):
        yield


@planted()
def dead_letters_never_die() -> AbstractContextManager[Any]:
    """A lease that runs out is always tried again, however often that was."""

    def make(expire: Any) -> Any:
        return lambda span, retry, now: expire(span, replace(retry, max_attempts=1_000), now)

    return instead_of(machine, "_expire", make)


@planted()
def attempt_not_counted() -> AbstractContextManager[Any]:
    """A grant does not count as an attempt."""

    def make(grant: Any) -> Any:
        def uncounted(span: Span, command: Any, now: int) -> Any:
            outcome = grant(span, command, now)
            return replace(outcome, to=replace(outcome.to, attempt=span.attempt)) if _moved(outcome) else outcome

        return uncounted

    return instead_of(machine, "_grant", make)


@planted()
def release_burns_an_attempt() -> AbstractContextManager[Any]:
    """Handing work back costs one of its attempts."""

    def make(acknowledge: Any) -> Any:
        def costly(span: Span, command: Any, now: int) -> Any:
            outcome = acknowledge(span, command, now)
            if isinstance(command, Release) and _moved(outcome):
                return replace(outcome, to=replace(outcome.to, attempt=span.attempt, ended=None))
            return outcome

        return costly

    return instead_of(machine, "_acknowledge", make)


def _moved(outcome: Any) -> bool:
    return isinstance(outcome, Moved)


# The log


@planted()
def event_outside_of_the_transaction() -> AbstractContextManager[Any]:
    """The log row is written after the commit: a crash in between loses it."""

    def make(commit: Any) -> Any:
        def commit_then_log(self: Any) -> None:
            later = [write for write in self.writes if "omnirelay_log" in write.sql and "INSERT" in write.sql]
            self.writes = [write for write in self.writes if write not in later]
            commit(self)
            for write in later:
                self._connection.execute(write.sql, write.params)

        return commit_then_log

    return instead_of(sqlite.SqliteTransaction, "commit", make)


@planted()
@contextmanager
def serial_instead_of_the_head_row() -> Iterator[None]:
    """Log numbers come from a counter of their own, drawn before the lock, as a database's serial column does it."""
    counters: dict[tuple[str, int], Iterator[int]] = {}
    drawing = threading.Lock()

    def draw_first(begin: Any) -> Any:
        def begin_late(self: Any) -> None:
            with drawing:
                counter = counters.setdefault((str(self.store.url), self.ns), itertools.count(1))
                self.serial = next(counter)
            time.sleep(0.0002)  # between drawing and locking, others may pass
            begin(self)

        return begin_late

    def number_by_serial(log: Any) -> Any:
        return lambda self, first, last, *what: log(self, self.serial, self.serial + last - first, *what)

    with (
        instead_of(sqlite.SqliteTransaction, "_begin", draw_first),
        instead_of(sqlite.SqliteTransaction, "log", number_by_serial),
    ):
        yield


@planted()
def non_dense_sequence() -> AbstractContextManager[Any]:
    """Now and then a number is left out."""

    def make(record: Any) -> Any:
        def skipping(self: Any, entry: Entry, names: Any = ()) -> int:
            first: int = record(self, entry, names)
            self.head.number += self.head.number % 17 == 0
            return first

        return skipping

    return instead_of(unit.Unit, "record", make)


@planted()
def event_without_its_time() -> AbstractContextManager[Any]:
    """The log does not say from when on a failed item may be tried again, so replay cannot know."""

    def make(record: Any) -> Any:
        def forgetful(self: Any, entry: Entry, names: Any = ()) -> int:
            if entry.type == "Failed" and entry.requeued:
                entry.available_at = self.now
            return record(self, entry, names)  # type: ignore[no-any-return]

        return forgetful

    return instead_of(unit.Unit, "record", make)


@planted()
def torn_write() -> AbstractContextManager[Any]:
    """An enqueue commits its items first and their standing second: a crash in between leaves half."""

    def make(flush: Any) -> Any:
        def in_two_halves(self: Any) -> None:
            if self.items:
                rows, self.items = self.items, []
                self._connection.executemany(sqlite._INSERT_ITEM, [(*row, self.ns) for row in rows])
                self._connection.execute("COMMIT")
                self._connection.execute("BEGIN IMMEDIATE")
            flush(self)

        return in_two_halves

    return instead_of(sqlite.SqliteTransaction, "flush", make)


@planted()
def prune_past_a_reader() -> AbstractContextManager[Any]:
    """Pruning does not ask who has yet to read."""

    def make(fetch: Any) -> Any:
        def blind(self: Any, *queries: Any) -> Any:
            rows = fetch(self, *queries)
            return [[[None]] if "min(cursor)" in q.sql else found for q, found in zip(queries, rows, strict=True)]

        return blind

    return instead_of(unit.Unit, "fetch", make)


# Order and exclusivity


@planted()
def priority_ignored() -> AbstractContextManager[Any]:
    """Work is found in the order it came; only what was found is sorted by priority."""
    return mock.patch.object(selects, "_READY_SPANS", selects._READY_SPANS.replace("priority DESC, ", ""))


@planted(exclusive="resource")
def exclusivity_ignored() -> AbstractContextManager[Any]:
    """A key that becomes free lets all of its items go."""
    every = "UPDATE omnirelay_span SET ready = CASE WHEN available_at <= ? THEN 1 ELSE 2 END "
    every += "WHERE ns = ? AND ns = ? AND state = 1 AND key {member}"
    return mock.patch.object(unit, "_OPEN_LANES", every)


@planted(exclusive="partition")
def last_come_first_served() -> AbstractContextManager[Any]:
    """The newest item of a key goes first instead of the oldest."""
    return mock.patch.object(unit, "_OPEN_LANES", unit._OPEN_LANES.replace("min(w.first)", "max(w.first)"))


@planted(exclusive="resource")
def key_left_behind() -> AbstractContextManager[Any]:
    """Items that come back from the dead or from a drain take no part in exclusivity any more."""
    return mock.patch.object(entering, "with_key", lambda unit, span, item: span)


# Counting, dedupe, backpressure, restore


@planted()
def dedupe_dropped() -> AbstractContextManager[Any]:
    """Nobody looks for a request id before adding its item again."""
    return mock.patch.object(entering, "by_request_id", return_value=[])


@planted()
def dedupe_in_the_batch_dropped() -> AbstractContextManager[Any]:
    """The same: and the index that would refuse the second one is not there either, as the ids are not stored."""

    def make(to_row: Any) -> Any:
        return lambda sequence_id, at, item: to_row(sequence_id, at, replace(item, request_id=None))

    return instead_of(payload, "to_row", make)


@planted()
def counters_drift() -> AbstractContextManager[Any]:
    """A dead item that is requeued or purged is still counted as dead."""

    def make(become: Any) -> Any:
        def drifting(self: Any, span: Span, to: Span | None) -> None:
            become(self, span, to)
            self.head.dead += len(span) if span.state is State.DEAD else 0

        return drifting

    return instead_of(unit.Unit, "_become", make)


@planted()
def backpressure_never_cleared() -> AbstractContextManager[Any]:
    """Once above the high mark, always above it."""

    def make(decide: Any) -> Any:
        return lambda self: None if self.head.backpressure else decide(self)

    return instead_of(unit.Unit, "_decide_backpressure", make)


@planted()
def backpressure_logged_twice() -> AbstractContextManager[Any]:
    """Every change of backpressure is logged once more."""

    def make(decide: Any) -> Any:
        def twice(self: Any) -> None:
            before = len(self.entries)
            decide(self)
            for entry in self.entries[before:]:
                self.record(replace(entry))

        return twice

    return instead_of(unit.Unit, "_decide_backpressure", make)


@planted()
def hysteresis_missing() -> AbstractContextManager[Any]:
    """Backpressure ends as soon as the depth is below the high mark, not only at the low mark."""

    def make(decide: Any) -> Any:
        def hasty(self: Any) -> None:
            low, high = self.head.low_mark, self.head.high_mark
            self.head.low_mark = None if high is None else high - 1
            try:
                decide(self)
            finally:
                self.head.low_mark = low

        return hasty

    return instead_of(unit.Unit, "_decide_backpressure", make)


@planted()
def restore_not_idempotent() -> AbstractContextManager[Any]:
    """Whatever is restored is added, whether it is here or not."""
    return mock.patch.object(entering._Here, "restore", entering._Here._add)


@planted()
def errors_not_kept() -> AbstractContextManager[Any]:
    """What went wrong is logged, but not kept with the item."""
    return mock.patch.object(unit.Unit, "keep_error", return_value=None)


@planted()
def forgets_too_soon() -> AbstractContextManager[Any]:
    """Finished items are forgotten a second before their retention has passed."""

    def make(forget: Any) -> Any:
        return lambda unit, kept: forget(unit, kept - 1_000_000)

    return instead_of(retention, "forget_finished", make)


# Catching them


def seeds_until_caught(exclusive: str | None, url: str = MEMORY) -> tuple[int, BaseException] | None:
    """How many seeds the simulator needs to find something wrong, and what it says; None if it finds nothing."""
    for count, seed in enumerate(SEEDS, 1):
        try:
            History(seed, url, exclusive).run(STEPS)
        except HistoryFailed as failed:
            return count, failed.cause
    return None


@pytest.mark.parametrize("name", BUGS)
def test_the_simulator_catches(name: str, record_property: Callable[[str, object], None]) -> None:
    bug, exclusive = BUGS[name]
    with bug():
        caught = seeds_until_caught(exclusive)
    assert caught is not None, f"{name} went unnoticed in {len(SEEDS)} histories"
    seeds, cause = caught
    assert isinstance(cause, Violation), f"{name} was not caught by a check, but tripped over: {cause!r}"
    record_property("seeds", seeds)


def every_doubt_is_a_failure() -> AbstractContextManager[Any]:
    """A commit that got no answer is taken for one that did not happen, and done again."""
    return mock.patch.object(base.Store, "_settled", return_value=False)


def every_doubt_is_a_success() -> AbstractContextManager[Any]:
    """A commit that got no answer is taken for one that happened."""
    return mock.patch.object(base.Store, "_settled", return_value=True)


@pytest.mark.parametrize("bug", [every_doubt_is_a_failure, every_doubt_is_a_success])
def test_the_simulator_catches_on_postgresql(bug: Bug, postgres_url: str) -> None:
    with bug():
        assert seeds_until_caught(None, postgres_url) is not None


@pytest.mark.parametrize("exclusive", [None, "resource", "partition"])
def test_without_a_bug_the_same_histories_pass(exclusive: str | None) -> None:
    for seed in SEEDS[:8] if exclusive else SEEDS:
        History(seed, exclusive=exclusive).run(STEPS)


# Waiting and concurrency, with real threads and the real clock


def a_waiting_worker_wakes(url: str) -> bool:
    """Somebody waits for work; work comes; the wait must end at once and not by its time running out."""
    with LeaseQueue.open(url, "waking-worker", auto_migrate=True) as queue:
        return _wakes(lambda: queue.lease("worker", wait=2.0), lambda: queue.enqueue(WorkItem("file", "a")))


def a_waiting_producer_wakes(url: str) -> bool:
    """Somebody waits for room; the depth falls to the low mark; the wait must end at once."""
    config = QueueConfig(high_watermark=2, low_watermark=1)
    with LeaseQueue.open(url, "waking-producer", config, auto_migrate=True) as queue:
        queue.enqueue([WorkItem("file", "a"), WorkItem("file", "b")])
        return _wakes(lambda: queue.enqueue(WorkItem("file", "c"), wait=2.0), lambda: queue.lease("worker"))


def _wakes(wait: Callable[[], Any], act: Callable[[], Any]) -> bool:
    ended: list[float] = []

    def waiting() -> None:
        wait()
        ended.append(time.monotonic())

    sleeper = threading.Thread(target=waiting)
    sleeper.start()
    time.sleep(0.3)  # long asleep by now
    acted = time.monotonic()
    act()
    sleeper.join(5.0)
    return bool(ended) and ended[0] - acted < 1.0


def a_tailing_reader_misses_nothing(url: str, writers: int = 4, each: int = 30) -> bool:
    """Writers append at the same time while a reader follows the log by its cursor. It must see every number once."""
    seen: list[int] = []
    with ExitStack() as opened:
        queues = [opened.enter_context(LeaseQueue.open(url, "tailing")) for _ in range(writers)]
        threads = [threading.Thread(target=_enqueue_one_by_one, args=(queue, each)) for queue in queues]
        for thread in threads:
            thread.start()
        try:
            while len(seen) < writers * each:
                alive = any(thread.is_alive() for thread in threads)
                more = queues[0].events(after=seen[-1] if seen else 0)
                seen.extend(event.sequence_number for event in more)
                if not alive and not more:
                    break
                time.sleep(0.002)
        except EventsPruned:  # a gap: the queue believes that what it cannot see is gone
            return False
        finally:
            for thread in threads:
                thread.join()
    return seen == list(range(1, writers * each + 1))


def _enqueue_one_by_one(queue: LeaseQueue, count: int) -> None:
    for number in range(count):
        queue.enqueue(WorkItem("file", str(number)))


def deaf_bell() -> AbstractContextManager[Any]:
    """Commits do not ring: whoever waits on a queue in memory sleeps on."""
    return mock.patch.object(sqlite.MemoryBell, "ring", return_value=None)


def blind_to_the_file() -> AbstractContextManager[Any]:
    """The watch on the file never sees it change."""
    return mock.patch.object(sqlite.FileBell, "listen", return_value=0)


def notification_dropped() -> AbstractContextManager[Any]:
    """PostgreSQL is not asked to wake anybody."""
    return mock.patch.object(postgres.PostgresTransaction, "notify", return_value=None)


@pytest.mark.parametrize("wakes", [a_waiting_worker_wakes, a_waiting_producer_wakes])
def test_a_lost_wake_up_in_memory_is_caught(wakes: Callable[[str], bool]) -> None:
    assert wakes("sqlite://")
    with deaf_bell():
        assert not wakes("sqlite://")


@pytest.mark.parametrize("wakes", [a_waiting_worker_wakes, a_waiting_producer_wakes])
def test_a_lost_wake_up_on_a_file_is_caught(wakes: Callable[[str], bool], tmp_path: Path) -> None:
    assert wakes(f"sqlite:///{tmp_path}/right.db")
    with blind_to_the_file():
        assert not wakes(f"sqlite:///{tmp_path}/wrong.db")


@pytest.mark.parametrize("wakes", [a_waiting_worker_wakes, a_waiting_producer_wakes])
def test_a_lost_wake_up_on_postgresql_is_caught(wakes: Callable[[str], bool], postgres_url: str) -> None:
    with notification_dropped():
        assert not wakes(postgres_url)
    with LeaseQueue.open(postgres_url, wakes.__name__.replace("a_waiting_", "waking-").removesuffix("_wakes")) as queue:
        queue.drain()
        while leases := queue.lease("tidy", 10):
            queue.complete(leases)
    assert wakes(postgres_url)


def test_numbers_out_of_commit_order_are_caught(tmp_path: Path) -> None:
    assert a_tailing_reader_misses_nothing(f"sqlite:///{tmp_path}/right.db")
    with serial_instead_of_the_head_row():
        assert not a_tailing_reader_misses_nothing(f"sqlite:///{tmp_path}/wrong.db")
