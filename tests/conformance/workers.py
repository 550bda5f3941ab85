"""What other processes do in the tests. They are forked from a clean server process, so starting one is cheap."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection

from lease_core import LeaseQueue, QueueConfig
from tests.conformance.vocabulary import work

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def pool(size: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(size, PROCESSES)


def open_again(url: str, namespace: str) -> LeaseQueue:
    return LeaseQueue.open(url, namespace, QueueConfig())


def keep_busy(queue: LeaseQueue, name: str, rounds: int) -> int:
    """Some of everything, in small transactions. Gives how many items were completed."""
    completed = 0
    for turn in range(rounds):
        queue.enqueue([work(f"{name}-{turn}-{n}") for n in range(3)])
        leases = queue.lease(name, 4)
        if not leases:
            continue
        queue.heartbeat(leases[:1])
        queue.release(leases[3:])
        queue.fail(leases[2:3], "broken", delay=0)
        completed += len(queue.complete(leases[:2]).accepted)
    return completed


def keep_busy_elsewhere(url: str, namespace: str, name: str, rounds: int) -> int:
    with open_again(url, namespace) as queue:
        return keep_busy(queue, name, rounds)


def enqueue_requests(url: str, namespace: str, requests: list[str]) -> list[tuple[str, int, bool]]:
    """Enqueue in batches of four. Gives each request with the id it got and whether it was a duplicate."""
    with open_again(url, namespace) as queue:
        return ask_for(queue, requests)


def ask_for(queue: LeaseQueue, requests: list[str]) -> list[tuple[str, int, bool]]:
    got: list[tuple[str, int, bool]] = []
    for start in range(0, len(requests), 4):
        some = requests[start : start + 4]
        receipts = queue.enqueue([work(request, request_id=request) for request in some])
        got += [(r, receipt.sequence_id, receipt.duplicate) for r, receipt in zip(some, receipts, strict=True)]
    return got


def enqueue_on_demand(url: str, namespace: str, line: Connection) -> None:
    """For each number of seconds received: wait so long, enqueue, and send the time at which that was done."""
    with open_again(url, namespace) as queue:
        while (pause := line.recv()) is not None:
            time.sleep(pause)
            queue.enqueue(work())
            line.send(time.monotonic())


def lease_on_demand(url: str, namespace: str, line: Connection) -> None:
    """For each number received: lease so many items, and say so."""
    with open_again(url, namespace) as queue:
        while (limit := line.recv()) is not None:
            line.send(len(queue.lease("elsewhere", limit)))


def wait_for_room(url: str, namespace: str, line: Connection) -> None:
    """Wait to enqueue, having said so first."""
    with open_again(url, namespace) as queue:
        line.send("waiting")
        queue.enqueue(work("from elsewhere"), wait=60)
        line.send("enqueued")
