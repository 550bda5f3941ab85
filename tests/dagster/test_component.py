"""The queue from YAML, by the tools that people use for it: ``dg list``, ``dg check`` and ``dg scaffold``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox

from lease_core import LeaseQueue, QueueConfig, WorkItem
from omnirelay_dagster import LeaseQueueComponent, LeaseQueueResource
from omnirelay_dagster.component import QueueSettings

GOOD = {
    "queue": "landing",
    "asset": "bronze_events",
    "resource": {"url": "sqlite:///landing.db", "namespace": "landing", "high_watermark": 1000},
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project as ``dg`` wants it, with one leased asset and no queue yet."""
    defs = tmp_path / "tiny" / "defs"
    defs.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(
        dedent(
            """
            [project]
            name = "tiny"
            version = "0.1.0"
            [tool.dg]
            directory_type = "project"
            [tool.dg.project]
            root_module = "tiny"
            """
        )
    )
    (tmp_path / "tiny" / "__init__.py").touch()
    (defs / "__init__.py").touch()
    (tmp_path / "tiny" / "definitions.py").write_text(
        dedent(
            """
            from pathlib import Path
            import dagster as dg

            @dg.definitions
            def defs():
                return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
            """
        )
    )
    (defs / "bronze.py").write_text(
        dedent(
            """
            from omnirelay_dagster import leased_asset

            @leased_asset(queue="landing")
            def bronze_events(batch):
                return [item.resource_id for item in batch.items]
            """
        )
    )
    return tmp_path


def run_dg(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    venv = Path(sys.executable).parent
    return subprocess.run(
        [str(venv / "dg"), *arguments],
        cwd=project,
        env={
            **os.environ,
            "PATH": f"{venv}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(venv.parent),
            "PYTHONPATH": str(project),
            "COLUMNS": "200",
            "NO_COLOR": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write(project: Path, text: str) -> None:
    folder = project / "tiny" / "defs" / "landing"
    folder.mkdir()
    (folder / "defs.yaml").write_text(dedent(text))


def test_dg_lists_the_component(project: Path) -> None:
    done = run_dg(project, "list", "components", "--json")
    assert done.returncode == 0, done.stderr
    assert "omnirelay_dagster.LeaseQueueComponent" in done.stdout


@pytest.mark.slow
def test_dg_scaffolds_a_queue_that_loads_as_it_is(project: Path) -> None:
    made = run_dg(project, "scaffold", "defs", "omnirelay_dagster.LeaseQueueComponent", "landing")
    assert made.returncode == 0, made.stdout + made.stderr
    assert "queue: landing" in (project / "tiny" / "defs" / "landing" / "defs.yaml").read_text()
    checked = run_dg(project, "check", "defs")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_dg_launches_a_leased_asset(project: Path) -> None:
    url = f"sqlite:///{project}/fabric.db"
    (project / "tiny" / "defs" / "queue.py").write_text(
        dedent(
            f"""
            import dagster as dg
            from omnirelay_dagster import LeaseQueueResource

            @dg.definitions
            def queue():
                return dg.Definitions(resources={{"landing": LeaseQueueResource(url="{url}", namespace="landing")}})
            """
        )
    )
    with LeaseQueue.open(url, "landing") as queue:
        queue.enqueue([WorkItem("file", name) for name in "abc"])
        launched = run_dg(project, "launch", "--assets", "bronze_events")
        assert launched.returncode == 0, launched.stdout + launched.stderr
        assert queue.stats().completed == 3


@pytest.mark.slow
def test_dg_check_yaml_points_at_what_is_wrong(project: Path) -> None:
    write(
        project,
        """
        type: omnirelay_dagster.LeaseQueueComponent
        attributes:
          queue: landing
          aset: bronze_events
          resource:
            url: sqlite:///landing.db
            high_watermark: -1
        """,
    )
    done = run_dg(project, "check", "yaml")
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "aset" in told
    assert "-1" in told


def loaded(attributes: dict[str, Any]) -> dg.Definitions:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=LeaseQueueComponent,
            defs_yaml_contents={"type": "omnirelay_dagster.LeaseQueueComponent", "attributes": attributes},
        )
        with sandbox.load_component_and_build_defs(defs_path=path) as (component, defs):
            assert isinstance(component, LeaseQueueComponent)
            return defs


def test_yaml_gives_the_same_as_code() -> None:
    defs = loaded(GOOD)
    sensors = {sensor.name for sensor in defs.sensors or []}
    assert {"landing_observation_sensor", "landing_work_sensor"} <= sensors
    assert {job.name for job in defs.jobs or []} >= {"landing_drain_to_file", "landing_release_owner"}
    queue = (defs.resources or {})["landing"]
    assert isinstance(queue, LeaseQueueResource)
    assert queue.high_watermark == 1000
    assert [spec.key for spec in defs.resolve_all_asset_specs()] == [dg.AssetKey(["queues", "landing"])]


def test_sensors_can_be_off_and_are_given_what_yaml_says() -> None:
    defs = loaded({**GOOD, "sensors_on": False, "observe_every": 7, "work": {"max_concurrent_runs": 3}})
    sensors = {sensor.name: sensor for sensor in defs.sensors or []}
    assert {sensor.default_status for sensor in sensors.values()} == {dg.DefaultSensorStatus.STOPPED}
    assert sensors["landing_observation_sensor"].minimum_interval_seconds == 7


def test_a_resource_defined_elsewhere_is_left_alone() -> None:
    assert not loaded({"queue": "landing"}).resources


def test_the_example_of_the_docs_loads_and_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "dagster" / "components.md"
    [example] = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("FABRIC_URL", "sqlite:///from_the_environment.db")
    defs = loaded(yaml.safe_load(example)["attributes"])
    assert "landing_backpressure_sensor" in {sensor.name for sensor in defs.sensors or []}
    queue = (defs.resources or {})["landing"]
    assert isinstance(queue, LeaseQueueResource)
    assert queue.url == "sqlite:///from_the_environment.db"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"queue": "not a key"}, "must be the key of a LeaseQueueResource"),
        ({"resource": {"url": "fabric.db"}}, "is not a database URL"),
        ({"resource": {"url": "sqlite:///a.db", "low_watermark": 5}}, "needs a high_watermark"),
        ({"asset_key": "bronze_events"}, "is the key of the asset that works on the queue"),
    ],
)
def test_what_cannot_work_is_refused_when_definitions_load(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Dagster wraps it in an error of its own
        loaded({**GOOD, **changes})
    causes: list[str] = []
    error: BaseException | None = caught.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__ or error.__context__
    assert words in "\n".join(causes)


def test_yaml_knows_every_setting_of_the_queue() -> None:
    own = {"url", "namespace", "auto_migrate"}
    assert set(QueueSettings.model_fields) == own | set(QueueConfig.model_fields)
    assert set(QueueSettings.model_fields) <= set(LeaseQueueResource.model_fields)
