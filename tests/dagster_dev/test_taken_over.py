"""A step that is stopped past the end of its lease, and goes on after another run has done its work."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from tests.dagster_dev import instance_view as view
from tests.dagster_dev.fabric import Fabric, log_of
from tests.dagster_dev.staged_work import give_cue, item

NAMES = [f"t{n}" for n in range(5)]

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("fabric", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_a_zombie_cannot_publish_what_it_wrote_and_leaves_no_materialization(fabric: Fabric) -> None:
    dev, queue, outputs = fabric.dev, fabric.queue("takeover"), fabric.outputs("takeover")
    queue.enqueue([item(name, number=n) for n, name in enumerate(NAMES)])
    zombie = view.launch(dev, "overtaken_job")
    step = fabric.actor("overtaken").step
    note = fabric.home / "written" / str(step)
    dev.until(note.exists)  # it has written its output, and has yet to publish it
    _stop_between_heartbeats(fabric, step)
    dev.until(lambda: queue.sweep().expired == len(NAMES))

    give_cue(fabric.home, "publish")
    successor = view.launch(dev, "overtaken_again_job")
    assert view.wait_for_run(dev, successor) == "SUCCESS"
    before = queue.stats().head
    os.kill(step, signal.SIGCONT)
    assert view.wait_for_run(dev, zombie) == "FAILURE"

    said = view.said(dev, zombie)
    assert "LeaseRefused" in said
    assert "fenced off" in said
    assert "AssetMaterializationPlannedEvent" in (recorded := view.recorded(dev, zombie))
    assert not recorded & {"MaterializationEvent", "HandledOutputEvent", "ExecutionStepSuccessEvent"}
    assert [made["run"] for made in view.materializations(dev, "overtaken")] == [successor]

    completed = [event for event in log_of(queue) if event.type == "Completed"]
    assert {event.token.attempt for event in completed if event.token} == {2}
    assert len(completed) == len(NAMES)
    assert log_of(queue, before) == []  # whatever it tried, it changed nothing
    left_behind = Path(note.read_text())
    assert left_behind.exists()
    assert [row["name"] for row in outputs.load("overtaken")] == NAMES
    [published] = outputs.published("overtaken")
    assert published.path not in str(left_behind)
    [removed] = outputs.vacuum(older_than=timedelta(0))
    assert removed.uri.endswith(str(left_behind.parent))
    assert not left_behind.exists()
    assert [row["name"] for row in outputs.load("overtaken")] == NAMES


def _stop_between_heartbeats(fabric: Fabric, step: int) -> None:
    """Right after one, that is: a process stopped in the middle of a transaction would keep SQLite's lock."""
    queue = fabric.queue("takeover")
    expiry = queue.leases()[0].expires_at
    fabric.dev.until(lambda: queue.leases()[0].expires_at > expiry)
    os.kill(step, signal.SIGSTOP)
