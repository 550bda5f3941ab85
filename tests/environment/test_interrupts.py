"""Ctrl-C and cancelled runs: an exception may come out of nowhere, in the middle of any operation.

Once at random, by a signal while the queue works; and once at every step of the code that talks to the database.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import lease_core.store
from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import LeaseError
from tests.interrupts import Interrupted, at_every_step
from tests.kills import audit
from tests.kills.forks import apart


def _interrupt(*_: object) -> None:
    raise Interrupted


def _interrupted_many_times(url: str, times: int, longest: float) -> int:
    """Work, and be interrupted at random. Gives how many items were acknowledged all the same."""
    dice = random.Random(url[:6])
    queue = LeaseQueue.open(url, config=QueueConfig(store_timeout=5))
    signal.signal(signal.SIGALRM, _interrupt)
    acknowledged: list[str] = []
    failures: list[str] = []
    for turn in range(times):
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(longest / 50, longest))
            try:
                for n in range(100):  # not for ever: an exception that hits a destructor is swallowed by Python
                    name = f"{turn}/{n}"
                    queue.enqueue([WorkItem("file", name, request_id=name)])
                    acknowledged.append(name)
                    queue.complete(queue.lease("worker", limit=5, duration=600))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            pass
        except Exception as error:
            failures.append(repr(error))
    _another_thread_can_use_it(queue)
    known = {event.item.request_id for event in audit.check_queue(queue) if event.type == "Enqueued" and event.item}
    assert known.issuperset(acknowledged)
    assert failures == [], failures
    return len(acknowledged)


def _another_thread_can_use_it(queue: LeaseQueue) -> None:
    done = threading.Event()
    item = WorkItem("file", "other", request_id="other")
    threading.Thread(target=lambda: (queue.enqueue(item), done.set()), daemon=True).start()
    assert done.wait(20), "the queue is locked for ever"


def test_interrupts_leave_a_queue_that_works(url: str) -> None:
    sqlite = url.startswith("sqlite")
    assert apart(_interrupted_many_times, url, *((600, 0.01) if sqlite else (100, 0.06)), timeout=120) > 0


STORE = Path(lease_core.store.__file__).parent
LATER = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("call", ["a lease of nothing", "an enqueue"])
def test_an_interrupt_at_any_step_leaves_nobody_waiting(url: str, call: str, stride: int) -> None:
    config = QueueConfig(store_timeout=2)
    with LeaseQueue.open(url, config=config) as queue, LeaseQueue.open(url, config=config) as other:
        work: dict[str, Callable[[], object]] = {
            "a lease of nothing": lambda: queue.lease("worker"),
            "an enqueue": lambda: queue.enqueue(WorkItem("file", "a", not_before=LATER)),
        }
        work[call]()
        for place in at_every_step([STORE], work[call], stride, everywhere=True):
            for each in (other, queue):
                try:
                    each.enqueue(WorkItem("file", "b", not_before=LATER))
                except LeaseError as error:
                    pytest.fail(f"after an interrupt at {place}: {error!r}")
