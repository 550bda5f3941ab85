"""Daemon, webserver, code servers, run and step are killed together, as the death of the machine would do it."""

from __future__ import annotations

import pytest

from tests.dagster_dev import instance_view as view
from tests.dagster_dev.fabric import Fabric, counts, log_of
from tests.dagster_dev.staged_work import give_cue, item

BATCH = 5

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "fabric",
    ["postgres, one location", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sqlite", "postgres"))],
    indirect=True,
)
def test_everything_is_killed_and_started_again(fabric: Fabric) -> None:
    dev, queue = fabric.dev, fabric.queue("wreck")
    queue.enqueue([item(f"w{n}", "wait", n) for n in range(BATCH)])
    run = view.launch(dev, "wrecked_job")
    fabric.actor("wrecked")
    dev.kill()
    assert queue.stats().active == BATCH  # nobody was there to hand it back
    dev.start()
    with fabric.sensing("wreck_run_status_silent"):
        assert view.wait_for_run(dev, run) == "FAILURE"  # Dagster would have called it started for ever
    assert "The run died unseen" in view.said(dev, run)
    assert counts(log_of(queue))["Expired"] == BATCH
    give_cue(fabric.home, "wrecked")
    successor = view.launch(dev, "wrecked_again_job")
    assert view.wait_for_run(dev, successor) == "SUCCESS"
    [made] = view.materializations(dev, "wrecked")
    assert (made["run"], made["omnirelay/attempt"]) == (successor, 2)
    assert sorted(row["name"] for row in fabric.outputs("wreck").load("wrecked")) == [f"w{n}" for n in range(BATCH)]
