"""The queue's main job, end to end: `make demo`.

Thousands of orders go in. Four processes work on them. One is killed with SIGKILL while it holds leases; another is
paused until its leases have run out, and then goes on as if nothing had happened. The others take over. At the end
the workers' own ledgers are compared with what went in: nothing is lost, and nothing was done twice.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path

from rich.console import Console

from definitions.progress import Bars
from definitions.proof import Evidence, as_table
from definitions.workers import CONFIG, work
from lease_core import LeaseQueue, WorkItem

DIRECTORY = Path(".demo/queue")
URL = f"sqlite:///{DIRECTORY}/queue.db"
WORKERS = ("anna", "ben", "carla", "dave")
KILLED, PAUSED = "ben", "carla"

console = Console()


def main() -> int:
    arguments = ArgumentParser(prog="make demo", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    arguments.add_argument("--orders", type=int, default=4_000, help="how many orders go in (default: %(default)s)")
    count = arguments.parse_args().orders

    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir(parents=True)
    dice = random.Random(2024)
    orders = {f"order-{n:05}.json": dice.randint(100, 99_999) for n in range(count)}
    with LeaseQueue.open(URL, config=CONFIG) as queue:
        with Bars(console, queue, count, WORKERS) as bars:
            enqueue(queue, orders, bars)
            lost = work_through_it(queue, bars, count)
        evidence = Evidence.gather(orders, queue, DIRECTORY)
    return report(evidence, lost)


def enqueue(queue: LeaseQueue, orders: Mapping[str, int], bars: Bars) -> None:
    """In batches. The request_id makes repeating a batch harmless, should the producer crash half-way."""
    items = [
        WorkItem("order", name, body=json.dumps({"cents": cents}).encode(), request_id=name)
        for name, cents in orders.items()
    ]
    for at in range(0, len(items), 500):
        queue.enqueue(items[at : at + 500])
        bars.follow()
    bars.say(f"{len(items):,} orders worth {sum(orders.values()) / 100:,.2f} are in the queue")


def work_through_it(queue: LeaseQueue, bars: Bars, count: int) -> dict[str, int]:
    """Let the workers empty the queue, through one crash and one long pause. Gives how many leases each cost."""
    lost = {}
    with worker_processes() as crowd:
        bars.say(f"{len(crowd)} processes work on them: {', '.join(crowd)}")

        bars.follow_until(lambda: queue.stats().completed > count * 0.2)
        lost[KILLED] = stop_while_holding(queue, KILLED, crowd[KILLED])
        crowd[KILLED].kill()
        bars.say(f"{KILLED} was killed with SIGKILL while holding {lost[KILLED]} leases")

        bars.follow_until(lambda: queue.stats().completed > count * 0.4)
        lost[PAUSED] = stop_while_holding(queue, PAUSED, crowd[PAUSED])
        bars.say(f"{PAUSED} was paused with SIGSTOP while holding {lost[PAUSED]} leases")

        bars.follow_until(lambda: not held_by(queue, KILLED) and not held_by(queue, PAUSED))
        send(crowd[PAUSED], signal.SIGCONT)
        bars.say(f"others have taken over what the two held; {PAUSED} goes on, unaware of it")

        bars.follow_until(lambda: not any(process.is_alive() for process in crowd.values()))
    return lost


@contextmanager
def worker_processes() -> Iterator[dict[str, SpawnProcess]]:
    """None of them outlives the block."""
    context = multiprocessing.get_context("spawn")
    crowd = {
        name: context.Process(target=work, args=(URL, name, DIRECTORY / f"{name}.ledger"), daemon=True)
        for name in WORKERS
    }
    try:
        for process in crowd.values():
            process.start()
        yield crowd
    finally:
        for process in crowd.values():
            if process.pid is not None:
                process.kill()
                process.join()


def stop_while_holding(queue: LeaseQueue, worker: str, process: SpawnProcess) -> int:
    """Freeze a worker in the middle of its work. Gives how many leases it holds.

    If it happens to hold none, or is inside of a transaction so that nobody else gets on, it goes on and we try again.
    """
    while True:
        send(process, signal.SIGSTOP)
        held, completed = held_by(queue, worker), queue.stats().completed
        deadline = time.monotonic() + 0.5
        while held and time.monotonic() < deadline:
            if queue.stats().completed > completed:
                return held
            time.sleep(0.01)
        send(process, signal.SIGCONT)
        time.sleep(0.02)


def held_by(queue: LeaseQueue, worker: str) -> int:
    return sum(lease.owner_peer_id == worker for lease in queue.leases())


def send(process: SpawnProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def report(evidence: Evidence, lost: Mapping[str, int]) -> int:
    """Print what happened; 0 if every claim holds."""
    fates = dict.fromkeys(WORKERS, "")
    fates[KILLED] = f"killed while holding {lost[KILLED]} leases"
    fates[PAUSED] = f"paused; {lost[PAUSED]} completes refused"
    checks = evidence.checks(lost[KILLED], lost[PAUSED], PAUSED)
    for table in (evidence.by_worker(fates), evidence.by_event(), as_table(checks)):
        console.print()
        console.print(table)
    if all(check.holds for check in checks):
        console.print("\nNothing was lost, and nothing was done twice.", style="bold green")
        return 0
    console.print("\nA claim does not hold: this is a bug, please report it.", style="bold red")
    return 1


if __name__ == "__main__":
    sys.exit(main())
