"""The demo fabric without Spark: it loads, its sensors are on, and every file is enqueued once.

What it computes is tested in tests/fabric.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from definitions import arrivals
from definitions.fabric import fabric
from definitions.orders import file_bytes, write_files
from lease_core import LeaseQueue

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def defs(tmp_path: Path) -> dg.Definitions:
    return fabric(tmp_path)


@pytest.fixture
def queue(defs: dg.Definitions) -> Iterator[LeaseQueue]:
    with resource(defs, "landing").get_queue() as queue:
        yield queue


def resource(defs: dg.Definitions, name: str) -> Any:
    return (defs.resources or {})[name]


def tick(defs: dg.Definitions, cursor: str | None = None) -> Any:
    """What the sensor that enqueues files comes to."""
    resources = {name: resource(defs, name) for name in ("folder", "landing")}
    with dg.build_sensor_context(cursor=cursor, resources=resources) as context:
        return arrivals.landing_files(context)


def test_dagster_finds_valid_definitions_in_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-m", "definitions"]
    environment = {**os.environ, "FABRIC_HOME": str(tmp_path), "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_all_sensors_are_on_from_the_start(defs: dg.Definitions) -> None:
    sensors = defs.resolve_all_job_defs() and defs.get_repository_def().sensor_defs
    of_queues = {
        f"{queue}_{name}"
        for queue in ("landing", "refine", "days")
        for name in (
            "work_sensor",
            "observation_sensor",
            "run_status_failed",
            "run_status_canceled",
            "run_status_silent",
        )
    }
    of_tables = {f"lake__{name}_iceberg_sensor" for name in ("bronze_orders", "silver_orders", "daily_sales")}
    assert {sensor.name for sensor in sensors} == {
        *("order_generator", "landing_files", "bronze_batches", "touched_days", "views_sensor"),
        *("landing_backpressure_sensor", "landing_replication_sensor"),
        *(of_queues | of_tables),
    }
    assert {sensor.default_status for sensor in sensors} == {dg.DefaultSensorStatus.RUNNING}
    schedules = defs.get_repository_def().schedule_defs
    assert [schedule.default_status for schedule in schedules] == [dg.DefaultScheduleStatus.RUNNING]


def test_whatever_works_on_a_queue_leases_from_it(defs: dg.Definitions) -> None:
    for queue, asset in {"landing": "bronze_orders", "refine": "silver_orders", "days": "daily_sales"}.items():
        leased = defs.resolve_assets_def(asset)
        assert queue in leased.required_resource_keys
        assert resource(defs, queue).get_queue().namespace == queue


def test_the_queue_demo_does_without_dagster() -> None:
    script = "import sys, definitions.demo; sys.exit('dagster' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0


def test_the_example_instance_settings_are_valid(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "definitions" / "dagster.yaml").read_text())
    with dg.instance_for_test(overrides=settings, temp_dir=str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled


def test_each_file_is_enqueued_once_however_often_the_sensor_ticks(
    defs: dg.Definitions, queue: LeaseQueue, tmp_path: Path
) -> None:
    write_files(tmp_path / "landing", 5)
    first = tick(defs)
    tick(defs)  # as after a crash: the cursor was not stored
    assert tick(defs, first.cursor).cursor is None
    write_files(tmp_path / "landing", 2, first=5)
    tick(defs, first.cursor)
    enqueued = [event.item.request_id for event in queue.events() if event.type == "Enqueued" and event.item]
    assert enqueued == [f"orders-{number:06}.json" for number in range(7)]


def test_files_wait_in_the_folder_while_the_queue_is_too_deep(
    defs: dg.Definitions, queue: LeaseQueue, tmp_path: Path
) -> None:
    write_files(tmp_path / "landing", 110)
    second = tick(defs, tick(defs).cursor)
    assert second.cursor == "orders-000099.json"
    assert queue.stats().backpressure
    refused = tick(defs, second.cursor)
    assert refused.cursor is None
    assert "10 files wait" in refused.skip_reason.skip_message
    queue.complete([lease.token for lease in queue.lease("somebody", limit=90)])
    assert tick(defs, second.cursor).cursor == "orders-000109.json"


def test_the_generator_drops_more_than_the_queue_wants_and_then_a_little(defs: dg.Definitions, tmp_path: Path) -> None:
    folder = resource(defs, "folder")
    for cursor, there in ((None, arrivals.BURST), ("1", arrivals.BURST + arrivals.FILES_PER_TICK)):
        context = dg.build_sensor_context(cursor=cursor, resources={"folder": folder})
        result: Any = arrivals.order_generator(context)
        assert result.cursor == str(int(cursor or 0) + 1)
        assert len(folder.files()) == there


def test_the_same_seed_gives_the_same_files() -> None:
    assert file_bytes(7) == file_bytes(7)
    assert file_bytes(7) != file_bytes(7, seed=1)
