"""A worker of the demo: leases orders, does its work, writes it into its ledger, and completes the leases."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from lease_core import Lease, LeaseQueue, QueueConfig

CONFIG = QueueConfig(lease_duration=2.0)
BATCH = 25
SECONDS_PER_ORDER = 0.004


def work(url: str, name: str, ledger: Path) -> None:
    """Work until the queue is empty: nothing waits, and nobody holds anything that might come back."""
    with LeaseQueue.open(url, config=CONFIG) as queue, ledger.open("a", buffering=1) as book:
        while True:
            leases = queue.lease(name, limit=BATCH, wait=1.0)
            if leases:
                with queue.hold(leases):  # heartbeats from a thread, for as long as the work takes
                    book.writelines(lines(leases))
                # A careful worker asks hold.lost first. This one does not, so that the queue has to refuse it when it
                # was paused for too long.
                queue.complete(leases)
            elif (stats := queue.stats()).pending + stats.active == 0:
                return


def lines(leases: Iterable[Lease]) -> Iterable[str]:
    """The work: one line in the ledger for each order, naming the lease under which it was done."""
    for lease in leases:
        time.sleep(SECONDS_PER_ORDER)
        order = json.loads(lease.item.body)
        yield json.dumps({"order": lease.item.resource_id, "cents": order["cents"], "fence": lease.token.fence}) + "\n"
