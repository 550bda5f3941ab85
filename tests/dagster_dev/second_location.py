"""Another code location, which has one queue in common with the first."""

from __future__ import annotations

from typing import Any

import dagster as dg

from omnirelay_dagster import LeasedBatch, build_work_sensor, leased_asset
from tests.dagster_dev.staged_work import act
from tests.dagster_dev.surroundings import Surroundings

here = Surroundings.of_this_process()


@leased_asset(queue="shared", batch_size=2, drain=True, io_manager_key="shared_io")
def right(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Works on a queue that the other code location works on too."""
    return act(context, batch)


defs = dg.Definitions(
    assets=[right],
    sensors=[
        build_work_sensor(
            "shared",
            target=right,
            name="right_sensor",
            minimum_interval_seconds=3,
            default_status=dg.DefaultSensorStatus.STOPPED,
        )
    ],
    executor=dg.in_process_executor,
    resources={"shared": here.queue("shared"), "shared_io": here.outputs("shared")},
)
