"""Many threads and processes at once: a dense log, no work twice, no key held twice, nobody starved."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from lease_core import LeaseEvent, LeaseQueue
from lease_core.errors import EventsPruned, QueueFull
from tests.conformance import workers
from tests.conformance.backends import Backend
from tests.conformance.conftest import OpenQueue
from tests.conformance.replay import replay
from tests.conformance.vocabulary import log, names, work, works

WRITERS = 8


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that all start together. Gives their results; raises what any of them raised."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        start.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run, job) for job in jobs]]


@contextmanager
def tailing(queue: LeaseQueue) -> Iterator[list[LeaseEvent]]:
    """Read the log as it grows, by cursor, in small pages; at the end of the block read on to the head."""
    seen: list[LeaseEvent] = []
    done = threading.Event()

    def tail() -> None:
        while True:
            finished = done.is_set()
            page = queue.events(after=seen[-1].sequence_number if seen else 0, limit=7)
            seen.extend(page)
            if finished and not page:
                return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(tail)
        try:
            yield seen
        finally:
            done.set()
            reading.result(timeout=120)


def agrees_with_its_log(queue: LeaseQueue, seen: list[LeaseEvent]) -> None:
    stats = queue.stats()
    assert [event.sequence_number for event in seen] == list(range(1, stats.head + 1))
    assert seen == log(queue)
    told = replay(seen)
    assert {i: each.status() for i, each in told.items()} == {s.sequence_id: s for s in queue.inspect(list(told))}
    counts = [sum(each.state == state for each in told.values()) for state in ("pending", "leased", "completed")]
    assert [stats.pending, stats.active, stats.completed] == counts


def test_the_log_is_dense_and_never_skipped_under_eight_writing_threads(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None)
    with tailing(queue) as seen:
        completed = at_once(*[lambda n=n: workers.keep_busy(queue, f"thread-{n}", 12) for n in range(WRITERS)])
    agrees_with_its_log(queue, seen)
    assert queue.stats().completed == sum(completed)


def test_the_log_is_dense_and_never_skipped_under_eight_writing_processes(
    shared_backend: Backend, open_queue: OpenQueue
) -> None:
    queue = open_queue(clock=None)
    with tailing(queue) as seen, workers.pool(WRITERS) as pool:
        jobs = [
            pool.submit(workers.keep_busy_elsewhere, shared_backend.url, queue.namespace, f"process-{n}", 12)
            for n in range(WRITERS)
        ]
        completed = [job.result(timeout=120) for job in jobs]
    agrees_with_its_log(queue, seen)
    assert queue.stats().completed == sum(completed)


def test_no_item_is_handed_out_twice(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None)
    queue.enqueue(works(300))

    def take() -> list[int]:
        mine: list[int] = []
        while leases := queue.lease(threading.current_thread().name, 7):
            mine += [lease.token.sequence_id for lease in leases]
        return mine

    taken = [sequence_id for mine in at_once(*[take] * WRITERS) for sequence_id in mine]
    assert sorted(taken) == list(range(1, 301))


def test_two_queue_objects_in_one_process_share_the_work(shared_backend: Backend, open_queue: OpenQueue) -> None:
    queues = [open_queue(clock=None) for _ in range(4)]
    at_once(*[lambda queue=queue, n=n: workers.keep_busy(queue, f"object-{n}", 10) for n, queue in enumerate(queues)])
    agrees_with_its_log(queues[0], log(queues[-1]))


def check_requests(answers: list[list[tuple[str, int, bool]]], requests: list[str], queue: LeaseQueue) -> None:
    ids: dict[str, set[int]] = defaultdict(set)
    first: dict[str, int] = defaultdict(int)
    for request, sequence_id, duplicate in (each for answer in answers for each in answer):
        ids[request].add(sequence_id)
        first[request] += not duplicate
    assert {request: len(found) for request, found in ids.items()} == dict.fromkeys(requests, 1)
    assert first == dict.fromkeys(requests, 1)
    assert queue.stats().pending == len(requests)
    assert sorted(names(queue.lease("worker", 1_000))) == sorted(requests)


REQUESTS = [f"request-{n}" for n in range(40)]


def test_a_request_is_accepted_once_under_concurrent_enqueue_from_threads(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None)
    shuffled = [random.Random(n).sample(REQUESTS, len(REQUESTS)) for n in range(WRITERS)]
    answers = at_once(*[lambda mine=mine: workers.ask_for(queue, mine) for mine in shuffled])
    check_requests(answers, REQUESTS, queue)


def test_a_request_is_accepted_once_under_concurrent_enqueue_from_processes(
    shared_backend: Backend, open_queue: OpenQueue
) -> None:
    queue = open_queue(clock=None)
    with workers.pool(4) as pool:
        shuffled = [random.Random(n).sample(REQUESTS, len(REQUESTS)) for n in range(4)]
        jobs = [pool.submit(workers.enqueue_requests, shared_backend.url, queue.namespace, mine) for mine in shuffled]
        check_requests([job.result(timeout=120) for job in jobs], REQUESTS, queue)


@pytest.mark.parametrize("exclusive", ["resource", "partition"])
def test_a_key_is_never_held_twice_and_is_worked_off_in_order(open_queue: OpenQueue, exclusive: str) -> None:
    queue = open_queue(clock=None, exclusive=exclusive)
    keys = [f"key-{n}" for n in range(5)]
    dice = random.Random(1)
    items = [work(key, partition_key=key) for key in (dice.choice(keys) for _ in range(120))]
    for start in range(0, 120, 20):
        queue.enqueue(items[start : start + 20])
    held: set[str] = set()
    done: dict[str, list[int]] = defaultdict(list)
    guard = threading.Lock()
    left = threading.Semaphore(120)

    def labour() -> None:
        mine = random.Random(threading.get_ident())
        while left.acquire(blocking=False):
            leases = []
            while not leases:
                leases = queue.lease("worker", 1, wait=5)
            [lease] = leases
            key = lease.item.resource_id
            with guard:
                assert key not in held, f"{key} is held twice"
                held.add(key)
                done[key].append(lease.token.sequence_id)
            again = mine.random() < 0.2
            everywhere = names(queue.leases())
            assert len(everywhere) == len(set(everywhere)), "two leases on one key"
            with guard:
                held.remove(key)
                if again:
                    done[key].pop()
            if again:
                left.release()
                queue.release(lease)
            else:
                assert not queue.complete(lease).refused

    at_once(*[labour] * WRITERS)
    assert queue.stats().completed == 120
    expected = defaultdict(list)
    for sequence_id, item in enumerate(items, start=1):
        expected[item.resource_id].append(sequence_id)
    assert done == expected


def test_other_keys_are_not_starved_by_a_crowded_one(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None, exclusive="resource")
    queue.enqueue([work("crowded")] * 200)
    queue.enqueue([work(f"other-{n}") for n in range(7)])
    [crowded] = queue.lease("hog", 1)
    taken = at_once(*[lambda: queue.lease("worker", 1) for _ in range(7)])
    assert sorted(lease.item.resource_id for [lease] in taken) == [f"other-{n}" for n in range(7)]
    assert not queue.complete(crowded).refused


def test_overlapping_batches_in_opposite_orders_do_not_deadlock(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None)
    queue.enqueue(works(50))
    leases = queue.lease("worker", 50)

    def beat(batch: list[Any]) -> int:
        return sum(len(queue.heartbeat(batch).refused) for _ in range(10))

    assert at_once(*[lambda n=n: beat(leases[:: 1 if n % 2 else -1]) for n in range(WRITERS)]) == [0] * WRITERS
    results = at_once(*[lambda: queue.complete(leases, result="x") for _ in range(WRITERS)])
    assert all(len(result.accepted) == 50 for result in results)
    assert queue.stats().completed == 50


def test_of_many_who_end_one_lease_differently_exactly_one_does(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None)
    for _ in range(15):
        queue.enqueue(work())
        [lease] = queue.lease("worker")
        results = at_once(
            lambda: queue.complete(lease),  # noqa: B023
            lambda: queue.fail(lease, "broken", requeue=False),  # noqa: B023
            lambda: queue.release(lease),  # noqa: B023
        )
        assert [len(result.accepted) for result in results].count(1) == 1
        queue.drain()


def test_backpressure_admits_no_more_than_fits_under_concurrent_producers(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None, capacity=20)

    def produce() -> int:
        admitted = 0
        for _ in range(10):
            with suppress(QueueFull):
                admitted += len(queue.enqueue(works(3)))
        return admitted

    assert sum(at_once(*[produce] * WRITERS)) == queue.stats().pending == 18


def test_a_reader_sees_the_log_whole_or_is_told_that_it_was_pruned(open_queue: OpenQueue) -> None:
    queue = open_queue(clock=None)
    stop = threading.Event()

    def write_and_prune() -> None:
        try:
            for _ in range(60):
                queue.enqueue(works(2))
                queue.enqueue(works(3))
                queue.prune_events(before=queue.stats().head - 2)
        finally:
            stop.set()

    def read() -> int:
        pages = 0
        while not stop.is_set():
            after = 0
            try:
                page = queue.events(after=after, limit=100)
            except EventsPruned as pruned:
                after = pruned.oldest - 1
                try:
                    page = queue.events(after=after, limit=100)
                except EventsPruned:
                    continue
            assert [e.sequence_number for e in page] == list(range(after + 1, after + 1 + len(page)))
            pages += 1
        return pages

    _, *pages = at_once(write_and_prune, read, read, read)
    assert sum(pages) > 0
