"""Who is alive is judged by the clock that leases go by, not by that of the machine a sensor runs on."""

from __future__ import annotations

import time

import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem
from omnirelay_dagster.sensors.liveness import end_expired, owners


@pytest.mark.parametrize("ahead", [-3_600.0, 3_600.0])
def test_a_database_whose_clock_is_an_hour_off(ahead: float) -> None:
    now = [time.time() + ahead]
    with LeaseQueue.open("sqlite://", config=QueueConfig(lease_duration=30), clock=lambda: now[0]) as queue:
        queue.enqueue(WorkItem("file", "a"))
        queue.lease("worker")
        assert owners(queue) == ({"worker"}, True)
        end_expired(queue)
        assert queue.stats().active == 1
        now[0] += 60
        assert owners(queue) == (set(), True)
        end_expired(queue)
        assert queue.stats().active == 0
