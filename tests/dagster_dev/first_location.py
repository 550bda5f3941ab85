"""The code location under test. Each kind of proof has a queue of its own, so that none disturbs another."""

from __future__ import annotations

from typing import Any

import dagster as dg

from omnirelay_dagster import (
    LeasedBatch,
    build_run_status_sensors,
    build_work_sensor,
    lease_queue_definitions,
    leased_asset,
)
from tests.dagster_dev.staged_work import SlowToPublishIOManager, act
from tests.dagster_dev.surroundings import Surroundings

here = Surroundings.of_this_process()
OFTEN = {"minimum_interval_seconds": 3}
# each tick takes processor time from what is to be watched: a test starts those that it needs (Fabric.sensing)
WHEN_ASKED = {**OFTEN, "default_status": dg.DefaultSensorStatus.STOPPED}


@leased_asset(queue="storm", batch_size=4, drain=True, io_manager_key="storm_io")
def stormed(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Its processes are killed."""
    return act(context, batch, pause=0.1)


@leased_asset(queue="matrix", batch_size=5, io_manager_key="matrix_io")
def troubled(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Its runs are ended by force, in every way there is."""
    return act(context, batch)


@leased_asset(queue="matrix", batch_size=5, drain=True, io_manager_key="matrix_io")
def relieved(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Does what those runs have left undone."""
    return act(context, batch)


@leased_asset(queue="retry", batch_size=5, io_manager_key="retry_io", retry_policy=dg.RetryPolicy(max_retries=1))
def retried(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Its body raises, and Dagster tries again."""
    return act(context, batch)


@leased_asset(queue="refusal", batch_size=5, io_manager_key="refusal_io", retry_policy=dg.RetryPolicy(max_retries=1))
def hopeless(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Its body says that there is no use in trying again."""
    return act(context, batch)


@leased_asset(queue="wreck", batch_size=5, io_manager_key="wreck_io")
def wrecked(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """It dies along with everything else."""
    return act(context, batch)


@leased_asset(queue="takeover", batch_size=5, io_manager_key="takeover_io")
def overtaken(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Its step is paused until others have done the work."""
    return act(context, batch)


@leased_asset(queue="shared", batch_size=2, drain=True, io_manager_key="shared_io")
def left(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Works on a queue that the other code location works on too."""
    return act(context, batch)


@leased_asset(
    queue="regions",
    batch_size=5,
    by_partition=True,
    partitions_def=dg.StaticPartitionsDefinition(["north", "south"]),
    io_manager_key="regions_io",
)
def regional(context: dg.AssetExecutionContext, batch: LeasedBatch) -> Any:
    """Its partitions are backfilled."""
    return act(context, batch)


QUEUES = ("regions", "storm", "matrix", "retry", "refusal", "wreck", "shared")
TO_BE_KILLED = (troubled, wrecked, overtaken)  # with a process for the step, beside the run's own
LEFT_ALONE = (relieved, retried, hopeless)
SUCCEEDED = (wrecked, overtaken)  # by a run that is left alone
[*_, wreck_silent] = build_run_status_sensors("wreck", report_dead_runs=True, grace_seconds=2, **WHEN_ASKED)
storm = dg.define_asset_job("storm_job", [stormed], executor_def=dg.multiprocess_executor)

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[stormed, left, regional, *TO_BE_KILLED, *LEFT_ALONE],
        jobs=[
            *(
                dg.define_asset_job(f"{asset.key.path[-1]}_job", [asset], executor_def=dg.multiprocess_executor)
                for asset in TO_BE_KILLED
            ),
            *(dg.define_asset_job(f"{asset.key.path[-1]}_job", [asset]) for asset in LEFT_ALONE),
            *(dg.define_asset_job(f"{asset.key.path[-1]}_again_job", [asset]) for asset in SUCCEEDED),
            storm,
        ],
        executor=dg.in_process_executor,  # where nobody is to be killed, the step needs no process of its own
        sensors=[
            *build_run_status_sensors("matrix", **WHEN_ASKED),
            wreck_silent,
            build_work_sensor("shared", target=left, name="left_sensor", **WHEN_ASKED),
        ],
        resources={
            **{name: here.queue(name) for name in (*QUEUES, "takeover")},
            **{f"{name}_io": here.outputs(name) for name in QUEUES},
            "takeover_io": here.outputs("takeover", SlowToPublishIOManager),
        },
    ),
    lease_queue_definitions(
        queue="storm",
        asset=storm,
        default_status=dg.DefaultSensorStatus.STOPPED,
        work={"max_concurrent_runs": 2, "items_per_run": 100, **OFTEN},
        run_status=OFTEN,
    ),
)
