"""Run status sensors: what a dead run holds goes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dagster as dg

from lease_core import LeaseQueue
from omnirelay_dagster.look import owner_of
from omnirelay_dagster.requirements import RESOURCE
from omnirelay_dagster.sensors.declaring import check_name, check_queue, check_seconds, check_timing, with_queue, wrong
from omnirelay_dagster.sensors.silent_runs import silent_run_sensor

_WATCHED = {"failed": dg.DagsterRunStatus.FAILURE, "canceled": dg.DagsterRunStatus.CANCELED}


def build_run_status_sensors(
    queue: str,
    *,
    report_dead_runs: bool = False,
    grace_seconds: float = 300.0,
    monitored_jobs: Sequence[Any] | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 10,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> list[dg.SensorDefinition]:
    """Three sensors that hand back what dead runs hold in the queue at the resource key ``queue``.

    ``{name}_failed`` and ``{name}_canceled`` act on runs as they fail or are cancelled: every lease of every step of
    the run goes back at once, without using up an attempt, and whatever a surviving step process does later is
    refused. They watch the runs of all code locations, or those of ``monitored_jobs``.

    ``{name}_silent`` looks for runs that died unseen. Such a run is still STARTED, one of its steps let a lease expire
    while Dagster believes it at work, and nothing was heard of the run, neither in the queue nor in Dagster, for
    ``grace_seconds``. It is logged as such or, with ``report_dead_runs=True``, reported failed, which frees its pool
    slots. This sensor also hands back what the other two missed, because they were off or the daemon was down.
    """
    check_queue(queue)
    name = check_name(name, f"{queue}_run_status")
    check_timing(minimum_interval_seconds, default_status)
    grace = check_seconds("grace_seconds", grace_seconds)
    if not isinstance(report_dead_runs, bool):
        raise wrong("report_dead_runs", f"must be True or False (got {report_dead_runs!r})")
    watching: list[dg.SensorDefinition] = [
        dg.RunStatusSensorDefinition(
            name=f"{name}_{what}",
            run_status=status,
            run_status_sensor_fn=with_queue(queue, _give_back),
            minimum_interval_seconds=minimum_interval_seconds,
            default_status=default_status,
            description=f"Hands back what a {what} run holds in the queue {queue!r}.",
            monitored_jobs=monitored_jobs,
            monitor_all_code_locations=monitored_jobs is None,
            metadata={RESOURCE: queue},
        )
        for what, status in _WATCHED.items()
    ]
    silent = silent_run_sensor(
        queue, f"{name}_silent", report_dead_runs, grace, minimum_interval_seconds, default_status
    )
    return [*watching, silent]


def _give_back(context: dg.RunStatusSensorContext, queue: LeaseQueue) -> None:
    """Release what any step of the run holds; the steps are those that Dagster saw begin."""
    run_id = context.dagster_run.run_id
    steps = [step.step_key for step in context.instance.get_run_step_stats(run_id)]
    released = sum(queue.release_owner(owner_of(run_id, step)) for step in steps)
    if released:
        context.log.info(f"handed back {released} items that the run {run_id} held in {queue.namespace!r}")
