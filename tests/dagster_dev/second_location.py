"""Another code location, which has one queue in common with the first, and one whose sensors are on from the start."""

from __future__ import annotations

from typing import Any

import dagster as dg

from omnirelay_dagster import LeasedBatch, build_work_sensor, lease_queue_definitions, leased_asset
from tests.dagster_dev.staged_work import act
from tests.dagster_dev.surroundings import Surroundings

here = Surroundings.of_this_process()
OFTEN = {"minimum_interval_seconds": 3}


@leased_asset(queue="landing", batch_size=5, io_manager_key="landing_io")
def bronze(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """What the UI shows of it is looked at."""
    return act(context, batch)


@leased_asset(queue="shared", batch_size=2, drain=True, io_manager_key="shared_io")
def right(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Works on a queue that the other code location works on too."""
    return act(context, batch)


right_sensor = build_work_sensor(
    "shared", target=right, name="right_sensor", default_status=dg.DefaultSensorStatus.STOPPED, **OFTEN
)

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[bronze, right],
        sensors=[right_sensor],
        resources={
            **{name: here.queue(name) for name in ("landing", "shared")},
            **{f"{name}_io": here.outputs(name) for name in ("landing", "shared")},
        },
        executor=dg.in_process_executor,
    ),
    lease_queue_definitions(queue="landing", asset=bronze, observe_every=3, work=OFTEN, run_status=OFTEN),
)
