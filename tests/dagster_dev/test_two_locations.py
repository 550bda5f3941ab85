"""Two code locations of one instance work on one queue."""

from __future__ import annotations

import pytest

from tests.dagster_dev import instance_view as view
from tests.dagster_dev.fabric import Fabric, counts, log_of
from tests.dagster_dev.staged_work import actors, give_cue, item

ITEMS = 40

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("fabric", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_two_code_locations_share_a_queue_and_nothing_is_done_twice(fabric: Fabric) -> None:
    dev, queue = fabric.dev, fabric.queue("shared")
    queue.enqueue([item(f"s{n}", "wait" if n < 4 else "", n) for n in range(ITEMS)])
    with fabric.sensing("left_sensor"), fabric.sensing("right_sensor", location=view.SECOND_LOCATION):
        # the first two batches wait, so that neither location is through before the other has begun
        sides = [fabric.actor(side) for side in ("left", "right")]
        for side in ("left", "right"):
            give_cue(fabric.home, side)
        dev.until(lambda: fabric.drained("shared"))
    for actor in sides:
        assert view.wait_for_run(dev, actor.run) == "SUCCESS"

    shares = {side: fabric.outputs("shared").load(side) for side in ("left", "right")}
    print({side: len(rows) for side, rows in shares.items()})
    assert all(shares.values())
    rows = [*shares["left"], *shares["right"]]
    assert sorted(row["name"] for row in rows) == sorted(f"s{n}" for n in range(ITEMS))
    assert sum(int(row["number"]) for row in rows) == sum(range(ITEMS))
    assert counts(log_of(queue))["Completed"] == ITEMS
    for side in ("left", "right"):
        assert sum(made["omnirelay/items"] for made in view.materializations(dev, side)) == len(shares[side])
        assert len(shares[side]) == 2 * len(actors(fabric.home, side))
