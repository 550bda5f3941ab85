"""The demo fabric: it loads, every file goes through it once, and its totals are those of the files."""

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

from definitions import fabric as code
from definitions.fabric_demo import what_the_fabric_says
from definitions.orders import file_text, write_files
from definitions.tally import tally
from lease_core import LeaseQueue

ROOT = Path(__file__).parent.parent.parent
NO_PAUSE = {"ops": {"bronze_orders": {"config": {"seconds_per_file": 0}}}}


@pytest.fixture
def defs(tmp_path: Path) -> dg.Definitions:
    return code.fabric(tmp_path)


@pytest.fixture
def queue(defs: dg.Definitions) -> Iterator[LeaseQueue]:
    with resource(defs, "landing").get_queue() as queue:
        yield queue


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


def resource(defs: dg.Definitions, name: str) -> Any:
    return (defs.resources or {})[name]


def tick(defs: dg.Definitions, cursor: str | None = None) -> Any:
    """What the sensor that enqueues files comes to."""
    resources = {name: resource(defs, name) for name in ("folder", "landing")}
    with dg.build_sensor_context(cursor=cursor, resources=resources) as context:
        return code.landing_files(context)


def run(defs: dg.Definitions, job: str, instance: dg.DagsterInstance, **arguments: Any) -> None:
    assert defs.resolve_job_def(job).execute_in_process(instance=instance, **arguments).success


def test_dagster_finds_valid_definitions_in_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dagster", "definitions", "validate", "-m", "definitions"]
    environment = {**os.environ, "FABRIC_HOME": str(tmp_path), "DAGSTER_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def test_all_sensors_are_on_from_the_start(defs: dg.Definitions) -> None:
    sensors = defs.resolve_all_job_defs() and defs.get_repository_def().sensor_defs
    assert {sensor.name for sensor in sensors} >= {
        *("order_generator", "landing_files", "refine_sensor", "landing_work_sensor"),
        *("landing_backpressure_sensor", "landing_observation_sensor", "landing_run_status_failed"),
    }
    assert {sensor.default_status for sensor in sensors} == {dg.DefaultSensorStatus.RUNNING}


def test_the_queue_demo_does_without_dagster() -> None:
    script = "import sys, definitions.demo; sys.exit('dagster' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0


def test_the_example_instance_settings_are_valid(tmp_path: Path) -> None:
    settings = yaml.safe_load((ROOT / "definitions" / "dagster.yaml").read_text())
    with dg.instance_for_test(overrides=settings, temp_dir=str(tmp_path)) as instance:
        assert instance.run_monitoring_enabled


def test_the_totals_are_those_of_the_files(
    defs: dg.Definitions, queue: LeaseQueue, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    write_files(tmp_path / "landing", 40)
    assert tick(defs).cursor == "orders-000039.json"
    run(defs, "load_bronze", instance, run_config=NO_PAUSE)
    run(defs, "refine", instance)

    stats = queue.stats()
    found = what_the_fabric_says(queue, lambda asset: defs.load_asset_value(asset, instance=instance))
    silver = defs.load_asset_value("silver_orders", instance=instance)
    assert found == tally(tmp_path / "landing")
    assert (stats.pending, stats.active, found.bad_files) == (0, 0, 2)
    assert found.bad_records > 0
    assert found.orders < found.records - found.bad_records  # some were sent more than once
    assert set(silver["country"]) == {"DE", "FR", "NL"}
    assert "JSONDecodeError" in (queue.dead_letters()[0].last_error or "")

    write_files(tmp_path / "landing", 1, first=40)
    assert found != tally(tmp_path / "landing")  # the comparison notices a file that was left out


def test_a_batch_without_a_single_good_file_is_no_failure(
    defs: dg.Definitions, queue: LeaseQueue, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    write_files(tmp_path / "landing", 1, first=11)
    tick(defs)
    run(defs, "load_bronze", instance, run_config=NO_PAUSE)
    assert (queue.stats().dead, queue.stats().completed) == (1, 0)


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
    for cursor, there in ((None, code.BURST), ("1", code.BURST + code.FILES_PER_TICK)):
        context = dg.build_sensor_context(cursor=cursor, resources={"folder": folder})
        result: Any = code.order_generator(context)
        assert result.cursor == str(int(cursor or 0) + 1)
        assert len(folder.files()) == there


def test_the_same_seed_gives_the_same_files() -> None:
    assert file_text(7) == file_text(7)
    assert file_text(7) != file_text(7, seed=1)
