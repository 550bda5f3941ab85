"""kill -9 of steps and run workers at random, while the instance works on a queue by itself: the totals are exact."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress

import psutil
import pytest

from tests.dagster_dev.fabric import Fabric, counts, log_of
from tests.dagster_dev.staged_work import Actor, item

BATCH = 4

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("fabric", "batches", "kills"),
    [
        pytest.param(
            "postgres, one location", 50, 3, id="postgres"
        ),  # on SQLite the same is killed, one by one, in the matrix
        pytest.param("sqlite", 300, 30, id="sqlite-long", marks=pytest.mark.slow),
        pytest.param("postgres", 300, 30, id="postgres-long", marks=pytest.mark.slow),
    ],
    indirect=["fabric"],
)
def test_whoever_is_killed_everything_is_published_exactly_once(fabric: Fabric, batches: int, kills: int) -> None:
    seed = int(os.environ.get("PROOF_SEED", random.randrange(1_000_000)))
    print(f"PROOF_SEED={seed}")
    dice = random.Random(seed)
    queue = fabric.queue("storm")
    head = queue.stats().head
    names = [f"{seed}-{n}" for n in range(BATCH * batches)]
    queue.enqueue([item(name, number=n) for n, name in enumerate(names)])

    plan = ["step", *dice.choices(["step", "run worker"], k=kills - 1)]
    with fabric.sensing("storm_work_sensor", *(f"storm_run_status_{of}" for of in ("failed", "canceled", "silent"))):
        for what in dice.sample(plan, kills):
            _kill_somebody(fabric, dice, what)
        fabric.dev.until(lambda: fabric.drained("storm"))

    rows = [row for row in fabric.outputs("storm").load("stormed") if row["name"].startswith(f"{seed}-")]
    assert Counter(row["name"] for row in rows) == Counter(names)
    assert sum(int(row["number"]) for row in rows) == sum(range(len(names)))
    events = log_of(queue, head)
    happened = counts(events)
    print(f"killed {dict(Counter(plan))}; {dict(happened)}")
    assert happened["Completed"] == len({event.sequence_id for event in events if event.type == "Completed"})
    assert happened["Completed"] == len(names)
    assert happened["LeaseGranted"] >= len(names) + plan.count("step")  # what they held was begun again
    assert len({event.token.lease_id for event in events if event.type == "Completed" and event.token}) >= batches


def _kill_somebody(fabric: Fabric, dice: random.Random, what: str) -> None:
    """Kill the step of somebody who holds leases at that very moment, or the worker of its run."""
    while True:
        fabric.dev.until(lambda: bool(_at_work(fabric)))
        time.sleep(dice.uniform(0.0, 0.3))  # somewhere in a batch, not always where it begins
        victims = _at_work(fabric)
        if not victims:
            continue
        victim = dice.choice(victims)
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if what == "run worker":
                os.kill(victim.worker, signal.SIGKILL)
                return
            step = psutil.Process(victim.step)
            if _stopped_while_holding(fabric, step):
                step.kill()
                return
            step.resume()


def _stopped_while_holding(fabric: Fabric, step: psutil.Process) -> bool:
    """Stop a step, and say whether it still holds leases: it might just have finished its batch."""
    step.suspend()
    fabric.dev.until(lambda: step.status() == psutil.STATUS_STOPPED)
    time.sleep(0.05)  # a commit that was on its way to the server arrives
    return step.pid in {actor.step for actor in _at_work(fabric)}


def _at_work(fabric: Fabric) -> list[Actor]:
    """Who holds leases, with both of its processes alive."""
    holders = {lease.owner_peer_id for lease in fabric.queue("storm").leases()}
    return [actor for actor in fabric.working("stormed") if f"dagster/{actor.run}/stormed" in holders]
