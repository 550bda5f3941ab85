"""All sensors together in a code location of its own process, ticked by the sensor daemon's own code."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.test_utils import create_test_daemon_workspace_context, wait_for_runs_to_finish
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.sensor import execute_sensor_iteration

from lease_core import LeaseQueue, WorkItem
from lease_core.config import QueueConfig

LAUNCH_AT_ONCE = {"run_coordinator": {"module": "dagster._core.run_coordinator", "class": "DefaultRunCoordinator"}}

FABRIC = """
import dagster as dg
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.sensors import (
    build_backpressure_sensor, build_replication_sensor, build_run_status_sensors, build_work_sensor
)

@leased_asset(queue="landing", batch_size=10)
def bronze(batch):
    with open({seen!r}, "a") as file:
        file.writelines(item.resource_id + "\\n" for item in batch.items)

@dg.sensor(default_status=dg.DefaultSensorStatus.RUNNING, minimum_interval_seconds=1)
def files(context):
    return dg.SkipReason("nothing landed")

often = dict(minimum_interval_seconds=1)
defs = dg.Definitions(
    assets=[bronze],
    sensors=[
        files,
        build_work_sensor("landing", target=bronze, items_per_run=30, minimum_interval_seconds=60),
        build_backpressure_sensor("landing", pool_limits={{"ingest": 1}}, pause_sensors=["files"], **often),
        build_replication_sensor("landing", granularity="resource", **often),
        *build_run_status_sensors("landing", **often),
    ],
    resources={{"landing": LeaseQueueResource(url={url!r}, namespace="landing")}},
    executor=dg.in_process_executor,
)
"""


def iterate(workspace: Any) -> None:
    """What the daemon does every five seconds."""
    errors = [error for error in execute_sensor_iteration(workspace, logging.getLogger(), None, None) if error]
    assert not errors


def states(instance: dg.DagsterInstance) -> dict[str, str]:
    found = instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
    return {state.name: state.status.value for state in found}


def cursor(instance: dg.DagsterInstance, name: str) -> str:
    [state] = [s for s in instance.all_instigator_state(instigator_type=InstigatorType.SENSOR) if s.name == name]
    assert state.sensor_instigator_data is not None
    return state.sensor_instigator_data.cursor or ""


def pool_limits(instance: dg.DagsterInstance) -> dict[str, int]:
    return {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}


def test_a_deep_queue_is_worked_on_and_its_feeders_are_held_back_until_it_is_shallow(tmp_path: Path) -> None:
    url, seen, code = f"sqlite:///{tmp_path / 'fabric.db'}", tmp_path / "seen", tmp_path / "fabric.py"
    code.write_text(FABRIC.format(url=url, seen=str(seen)))
    target = PythonFileTarget(
        python_file=str(code), attribute=None, working_directory=str(tmp_path), location_name="fabric"
    )
    marks = QueueConfig(high_watermark=8, low_watermark=2)
    with LeaseQueue.open(url, "landing", marks) as queue, dg.instance_for_test(overrides=LAUNCH_AT_ONCE) as instance:
        queue.enqueue([WorkItem(resource_type="file", resource_id=f"f{number}") for number in range(30)])
        instance.event_log_storage.set_concurrency_slots("ingest", 5)
        with create_test_daemon_workspace_context(target, instance) as workspace:
            iterate(workspace)
            assert pool_limits(instance) == {"ingest": 1}
            time.sleep(1.1)
            iterate(workspace)
            assert states(instance)["files"] == "STOPPED"
            assert json.loads(cursor(instance, "landing_backpressure_sensor"))["backpressure"] == "on"
            wait_for_runs_to_finish(instance, timeout=90)
        # that daemon and its code server are gone, somebody takes the rest out, and another daemon takes over
        assert len(queue.drain()) == 20
        assert [run.status for run in instance.get_runs()] == [dg.DagsterRunStatus.SUCCESS]
        time.sleep(1.1)
        with create_test_daemon_workspace_context(target, instance) as workspace:
            iterate(workspace)
        assert sorted(seen.read_text().split()) == sorted(f"f{number}" for number in range(10))
        assert len(instance.get_runs()) == 1
        assert pool_limits(instance) == {"ingest": 5}
        assert states(instance)["files"] == "DECLARED_IN_CODE"
        assert len(instance.get_dynamic_partitions("landing_resources")) == 30
        assert cursor(instance, "landing_replication_sensor") == str(queue.stats().head)
        assert queue.register_reader("dagster/fabric/landing_replication_sensor") >= 30
