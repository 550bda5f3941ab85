"""One queue in many hands: two objects, many threads, and processes forked while it is open."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from lease_core import Lease, LeaseQueue, QueueConfig, WorkItem, sqlite_file
from lease_core.errors import QueueClosed
from lease_core.hold import AskedAt, Hold
from tests.kills import audit
from tests.kills.forks import apart


def work(count: int, prefix: str = "") -> list[WorkItem]:
    return [WorkItem("file", f"{prefix}{n}", request_id=f"{prefix}{n}") for n in range(count)]


def test_two_namespaces_of_one_database_know_nothing_of_each_other(url: str) -> None:
    with LeaseQueue.open(url, "orders") as orders, LeaseQueue.open(url, "refunds") as refunds:
        orders.enqueue(work(3))
        refunds.enqueue(work(2))
        leases = orders.lease("worker", limit=10)
        assert len(leases) == 3
        assert refunds.stats().pending == 2
        assert [refusal.token for refusal in refunds.complete(leases).refused] == [each.token for each in leases]
        orders.complete(leases).raise_if_refused()
        assert (orders.stats().head, refunds.stats().head) == (9, 2)


def test_two_databases_in_one_process_know_nothing_of_each_other(tmp_path: Path) -> None:
    with (
        LeaseQueue.open(f"sqlite:///{tmp_path}/one.db") as one,
        LeaseQueue.open(f"sqlite:///{tmp_path}/two.db") as two,
        LeaseQueue.open("sqlite://") as three,
        LeaseQueue.open("sqlite://") as four,
    ):
        for count, queue in enumerate((one, two, three, four), start=1):
            queue.enqueue(work(count))
        assert [queue.stats().pending for queue in (one, two, three, four)] == [1, 2, 3, 4]


def test_two_objects_on_one_namespace_are_one_queue(url: str) -> None:
    with LeaseQueue.open(url) as one, LeaseQueue.open(url) as two, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.lease, "worker", wait=30)
        one.enqueue(work(1))
        one.complete(waiting.result(timeout=30)).raise_if_refused()
        assert two.stats() == one.stats()


def test_closing_one_object_leaves_the_other_alone(url: str) -> None:
    with LeaseQueue.open(url) as one:
        LeaseQueue.open(url).close()
        one.enqueue(work(1))
        other = LeaseQueue.open(url)
        one.close()
        assert len(other.lease("worker")) == 1
        other.close()
        with pytest.raises(QueueClosed):
            other.stats()


def test_threads_share_one_queue(url: str) -> None:
    with LeaseQueue.open(url) as queue:
        done = threads_at_work(queue, threads=8, each=60)
        assert sorted(done) == list(range(1, 481))
        events = audit.check_queue(queue)
        assert len(events) == 3 * 480


def threads_at_work(queue: LeaseQueue, threads: int, each: int, prefix: str = "") -> list[int]:
    """Every thread enqueues its share, then all work until everything is done. Gives the ids, as completed."""
    done: list[int] = []

    def run(n: int) -> None:
        for item in work(each, f"{prefix}{n}/"):
            queue.enqueue(item)
            if leases := queue.lease(f"thread-{n}", limit=3):
                done.extend(token.sequence_id for token in queue.complete(leases).raise_if_refused())

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    while leases := queue.lease("main", limit=100):
        done.extend(token.sequence_id for token in queue.complete(leases).raise_if_refused())
    return done


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can, so that a race that is there shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_hold_leases_while_others_end_theirs() -> None:
    stop = threading.Event()

    def hold_again_and_again(lease: Lease) -> None:
        recent = deque[Hold](maxlen=300)
        while not stop.is_set():
            recent.append(queue.hold(lease))

    with LeaseQueue.open("sqlite://") as queue, ThreadPoolExecutor(1) as pool:
        queue.enqueue(work(150))
        kept, *ended = queue.lease("worker", limit=150)
        holding = pool.submit(hold_again_and_again, kept)
        try:
            for lease in ended:
                queue.complete(lease).raise_if_refused()
        finally:
            stop.set()
        holding.result()


@pytest.mark.usefixtures("switching")
def test_threads_remember_when_they_asked() -> None:
    asked = AskedAt(keep=4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: [asked.remember(f"{n}/{each}", each) for each in range(40_000)], range(4)))
    asked.remember("last", 1.0)
    assert asked.of("last") == 1.0


# Forks. Each of these runs in a clean process of its own: pytest has threads, and a fork of it proves little.


def fork(act: Callable[[], object]) -> Callable[[], None]:
    """Run ``act`` in a forked child; call what comes back to wait for it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            act()
            gc.collect()  # what was inherited and is not used any more goes here, as it would on a normal exit
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def wait() -> None:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child failed"

    return wait


def all_done(url: str, count: int) -> None:
    with LeaseQueue.open(url) as queue:
        assert queue.stats().completed == count
        assert audit.follow(audit.check_queue(queue)).keys() == set(range(1, count + 1))


def _both_go_on(url: str) -> None:
    queue = LeaseQueue.open(url)
    queue.enqueue(work(10, "before/"))
    wait = fork(lambda: threads_at_work(queue, threads=2, each=40, prefix="child/"))
    threads_at_work(queue, threads=2, each=40, prefix="parent/")
    wait()
    threads_at_work(queue, threads=1, each=1, prefix="after/")
    all_done(url, 171)


def test_a_fork_after_open_parent_and_child_both_go_on(url: str) -> None:
    apart(_both_go_on, url)


def _child_outlives_parents_queue(url: str) -> None:
    queue = LeaseQueue.open(url)
    queue.enqueue(work(1, "before/"))
    reader, writer = os.pipe()

    def child() -> None:
        queue.enqueue(work(1, "child/first/"))
        os.write(up, b".")
        os.read(reader, 1)
        receipts = queue.enqueue(work(1, "child/second/"))
        assert [receipt.sequence_id for receipt in receipts] == [3]

    down, up = os.pipe()
    wait = fork(child)
    os.read(down, 1)
    queue.close()
    os.write(writer, b".")
    wait()
    with LeaseQueue.open(url) as again:
        assert [each.item.resource_id for each in again.lease("worker", limit=5)] == [
            "before/0",
            "child/first/0",
            "child/second/0",
        ]


def test_a_forked_child_loses_nothing_when_its_parent_closes_the_queue(url: str) -> None:
    apart(_child_outlives_parents_queue, url)


def _fork_in_the_middle(url: str) -> None:
    """Fork while another thread holds the queue's lock, which the child must not take for its own."""
    queue = LeaseQueue.open(url, config=QueueConfig(store_timeout=5))
    locked = threading.Event()

    def pause(point: str) -> None:
        if point == "locked" and threading.current_thread() is other:
            locked.set()
            threading.Event().wait(0.3)

    queue._store.probe = pause
    other = threading.Thread(target=lambda: queue.enqueue(work(1, "thread/")))
    other.start()
    locked.wait()

    def child() -> None:
        queue._store.probe = None
        assert queue.stats().pending <= 1
        queue.enqueue(work(1, "child/"))
        assert len(queue.lease("child")) == 1

    wait = fork(child)
    other.join()
    wait()
    queue.enqueue(work(1, "parent/"))
    assert (queue.stats().pending, queue.stats().active) == (2, 1)
    audit.check_queue(queue)


def test_a_fork_while_another_thread_writes(url: str) -> None:
    apart(_fork_in_the_middle, url)


def _fork_while_waiting(url: str) -> None:
    """Fork while another thread sleeps until work comes; both sides must go on waking."""
    queue = LeaseQueue.open(url)
    with ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(queue.lease, "parent", wait=30)
        threading.Event().wait(0.3)

        def child() -> None:
            [lease] = queue.lease("child", wait=30)
            queue.complete(lease).raise_if_refused()

        wait = fork(child)
        queue.enqueue(work(1, "first/"))
        queue.enqueue(work(1, "second/"))
        queue.complete(sleeper.result(timeout=30)).raise_if_refused()
        wait()
    all_done(url, 2)


def test_a_fork_while_another_thread_waits(url: str) -> None:
    apart(_fork_while_waiting, url)


def _fork_before_a_change(url: str) -> None:
    """Whatever a fork does to the sleeper's connection, a change right after it must not go unnoticed."""
    queue = LeaseQueue.open(url)
    with LeaseQueue.open(url) as other, ThreadPoolExecutor(1) as pool:
        sleeper = pool.submit(queue.lease, "sleeper", wait=20)
        threading.Event().wait(0.3)
        with getattr(queue._store, "mutex", nullcontext()):  # so that the sleeper cannot look in between
            wait = fork(lambda: None)
            other.enqueue(work(1))
        asked = time.monotonic()
        assert len(sleeper.result(timeout=30)) == 1
        assert time.monotonic() - asked < 10, "the sleeper was not woken"
        wait()


def test_a_fork_loses_no_wake_up(url: str) -> None:
    apart(_fork_before_a_change, url)


class Owner:
    """Has a file open, as far as a fork is concerned."""

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.mutex = threading.RLock()
        self.open = True
        self._meanwhile = meanwhile
        sqlite_file.let_go_before_forks(self)

    def let_go(self) -> None:
        self.open = False
        another = threading.Thread(target=self._meanwhile)
        another.start()
        another.join()


def _fork_while_another_opens() -> None:
    late: list[Owner] = []
    first = Owner(meanwhile=lambda: late.append(Owner()))
    fork(lambda: None)()
    assert (first.open, late[0].open) == (False, False)


def test_a_fork_does_not_miss_a_file_that_is_opened_just_before_it() -> None:
    """A handle that the child inherits makes it believe in locks that only its parent has."""
    apart(_fork_while_another_opens)


def _fork_twice(url: str) -> None:
    queue = LeaseQueue.open(url)
    queue.enqueue(work(1, "parent/"))

    def child() -> None:
        queue.enqueue(work(1, "child/"))
        wait = fork(lambda: queue.enqueue(work(1, "grandchild/")))
        queue.enqueue(work(1, "child again/"))
        wait()

    wait = fork(child)
    wait()
    queue.complete(queue.lease("worker", limit=10)).raise_if_refused()
    all_done(url, 4)


def test_a_fork_of_a_fork(url: str) -> None:
    apart(_fork_twice, url)


def _fork_in_memory() -> None:
    queue = LeaseQueue.open("sqlite://")
    queue.enqueue(work(1))

    def child() -> None:
        for use in (queue.stats, lambda: queue.enqueue(work(1)), lambda: queue.lease("child", wait=1)):
            with pytest.raises(QueueClosed, match="use a file"):
                use()

    fork(child)()
    assert len(queue.lease("parent")) == 1


def test_a_queue_in_memory_does_not_follow_a_fork() -> None:
    apart(_fork_in_memory)
