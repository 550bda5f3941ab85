"""A queue's definitions in one call: the example of ten lines, several queues, and what is refused at load."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_shared.libraries import DagsterLibraryRegistry

import omnirelay_dagster
from lease_core import WorkItem
from omnirelay_dagster import LeasedBatch, LeaseQueueResource, lease_queue_definitions, leased_asset

TEN_LINES = """
import dagster as dg
from omnirelay_dagster import LeaseQueueResource, leased_asset, lease_queue_definitions

@leased_asset(queue="landing", batch_size=500)
def bronze_events(context: dg.AssetExecutionContext, batch):
    return [item.resource_id for item in batch.items]

defs = dg.Definitions.merge(
    dg.Definitions(
        assets=[bronze_events],
        resources={"landing": LeaseQueueResource(url="sqlite:///fabric.db", namespace="landing")},
    ),
    lease_queue_definitions(queue="landing", asset=bronze_events),
)
"""
OPERATOR_JOBS = {"drain_to_file", "release_owner", "requeue_dead_letters", "restore_from_file"}


@leased_asset(queue="landing")
def bronze_events(batch: LeasedBatch) -> list[str]:
    return [item.resource_id for item in batch.items]


@leased_asset(queue="rebuilds")
def rebuilt(batch: LeasedBatch) -> int:
    return len(batch)


def resource(tmp_path: Path, name: str = "landing", **settings: Any) -> LeaseQueueResource:
    return LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace=name, **settings)


def merged(*parts: dg.Definitions) -> dg.RepositoryDefinition:
    """The parts together, loaded as a code location loads them."""
    defs = dg.Definitions.merge(*parts)
    dg.Definitions.validate_loadable(defs)
    return defs.get_repository_def()


def test_the_ten_lines_load_in_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "fabric.py").write_text(TEN_LINES)
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-f", "fabric.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "fabric.db").exists(), "loading definitions must not open the queue"


def test_the_ten_lines_give_a_queue_and_drain_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "fabric"}
    exec(compile(TEN_LINES, "fabric.py", "exec"), names)
    repository = merged(names["defs"])
    assert set(repository.asset_graph.get_all_asset_keys()) == {
        dg.AssetKey("bronze_events"),
        dg.AssetKey(["queues", "landing"]),
    }
    assert {f"landing_{duty}" for duty in OPERATOR_JOBS} <= set(repository.job_names)
    with resource(tmp_path).get_queue() as queue:
        queue.enqueue([WorkItem("file", str(number)) for number in range(7)])
        with dg.instance_for_test() as instance:
            [request] = requested(repository, instance, "landing_work_sensor")
            job = repository.get_implicit_job_def_for_assets([dg.AssetKey("bronze_events")])
            assert job is not None
            done = job.execute_in_process(instance=instance, tags=request.tags)
            assert done.success
            assert requested(repository, instance, "landing_work_sensor") == []
            [observation] = evaluated(repository, instance, "landing_observation_sensor").asset_events[:1]
        assert queue.stats().completed == 7
        assert observation.metadata["depth"].value == 0


def evaluated(repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, name: str) -> Any:
    """A tick as the daemon has it: the repository's own sensor with the repository's own resources."""
    sensor = repository.get_sensor_def(name)
    with dg.build_sensor_context(
        instance=instance,
        repository_def=repository,
        sensor_name=name,
        resources={key: repository.get_top_level_resources()[key] for key in sensor.required_resource_keys},
    ) as context:
        return sensor.evaluate_tick(context)


def requested(repository: dg.RepositoryDefinition, instance: dg.DagsterInstance, name: str) -> list[dg.RunRequest]:
    return list(evaluated(repository, instance, name).run_requests or [])


def test_two_queues_do_not_clash(tmp_path: Path) -> None:
    repository = merged(
        dg.Definitions(assets=[bronze_events, rebuilt]),
        lease_queue_definitions(queue="landing", asset=bronze_events, resource=resource(tmp_path)),
        lease_queue_definitions(queue="rebuilds", asset=rebuilt, resource=resource(tmp_path, "rebuilds")),
    )
    for queue in ("landing", "rebuilds"):
        assert {f"{queue}_{duty}" for duty in OPERATOR_JOBS} <= set(repository.job_names)
        assert {f"{queue}_observation_sensor", f"{queue}_work_sensor"} <= {s.name for s in repository.sensor_defs}


def test_sensors_are_on_unless_told_otherwise() -> None:
    on = lease_queue_definitions(queue="landing", asset=bronze_events)
    off = lease_queue_definitions(queue="landing", asset=bronze_events, default_status=dg.DefaultSensorStatus.STOPPED)
    assert {sensor.default_status for sensor in on.sensors or []} == {dg.DefaultSensorStatus.RUNNING}
    assert {sensor.default_status for sensor in off.sensors or []} == {dg.DefaultSensorStatus.STOPPED}


def test_without_an_asset_there_is_no_work_sensor_and_backpressure_only_if_asked_for() -> None:
    def names(**arguments: Any) -> set[str]:
        return {sensor.name for sensor in lease_queue_definitions(queue="landing", **arguments).sensors or []}

    assert "landing_work_sensor" not in names()
    assert "landing_observation_sensor" in names()
    assert "landing_backpressure_sensor" not in names(asset=bronze_events)
    assert "landing_backpressure_sensor" in names(backpressure={"pool_limits": {"ingest": 1}})


@pytest.mark.parametrize(
    "asset",
    [
        bronze_events,
        "bronze_events",
        dg.AssetKey("bronze_events"),
        [bronze_events],
        dg.AssetSelection.assets("bronze_events"),
        dg.define_asset_job("bronze_job", selection="bronze_events"),
    ],
    ids=["asset", "name", "key", "list", "selection", "job"],
)
def test_the_asset_can_be_named_in_many_ways(asset: Any, tmp_path: Path) -> None:
    merged(
        dg.Definitions(assets=[bronze_events]),
        lease_queue_definitions(queue="landing", asset=asset, resource=resource(tmp_path)),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"queue": "not a key"}, "must be the key of a LeaseQueueResource, such as queue='landing'"),
        ({"queue": "rebuilds"}, "bronze_events does not use the queue 'rebuilds' .its resources: landing."),
        ({"asset_key": "bronze_events"}, "asset_key: 'bronze_events' is the key of the asset that works on the queue"),
        ({"asset": []}, "asset: names no asset"),
        ({"asset": 3}, "asset: must be an asset, its key, a selection or a job"),
        ({"asset": None, "work": {"max_concurrent_runs": 2}}, "work: .* pass asset= as well"),
        ({"work": {"max_runs": 2}}, "work: 'max_runs' is no argument of build_work_sensor; it takes job"),
        ({"backpressure": {}}, "give at least one of them"),
        ({"max_lag": -1}, "max_lag: must be a whole number, 0 or more"),
        ({"observe_every": 0}, "observe_every: must be a whole number, 1 or more"),
    ],
)
def test_what_cannot_work_is_refused_in_words_that_help(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=words):
        lease_queue_definitions(**{"queue": "landing", "asset": bronze_events, **arguments})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "fabric.db"}, "url: is not a database URL; use sqlite:///path"),
        ({"url": "mysql://host/db"}, "url: mysql is not supported"),
        ({"high_watermark": -1}, "high_watermark: .*greater than or equal to 1"),
        ({"low_watermark": 5}, "low_watermark: needs a high_watermark"),
        ({"high_watermark": 5, "low_watermark": 9}, "low_watermark: must be below high_watermark"),
        ({"heartbeat_interval": 29}, "heartbeat_interval: must be at most half of lease_duration"),
        ({"exclusive": "table"}, "exclusive: "),
    ],
)
def test_a_queue_that_could_never_open_is_refused(settings: dict[str, Any], words: str) -> None:
    def define() -> None:
        queue = LeaseQueueResource(**{"url": "sqlite:///fabric.db", **settings})
        lease_queue_definitions(queue="landing", asset=bronze_events, resource=queue)

    with pytest.raises(Exception, match=words):
        define()


def test_what_the_environment_decides_is_not_judged_at_load() -> None:
    LeaseQueueResource(url=dg.EnvVar("FABRIC_URL"))
    LeaseQueueResource(url="sqlite://", high_watermark=dg.EnvVar.int("FABRIC_HIGH"))


def clash_with_an_asset(tmp_path: Path) -> None:
    @dg.asset(key=["queues", "landing"])
    def mine() -> None: ...

    merged(dg.Definitions(assets=[mine]), lease_queue_definitions(queue="landing", resource=resource(tmp_path)))


def same_queue_twice(tmp_path: Path) -> None:
    merged(
        lease_queue_definitions(queue="landing", resource=resource(tmp_path)),
        lease_queue_definitions(queue="landing"),
    )


def unknown_queue(tmp_path: Path) -> None:
    merged(
        dg.Definitions(resources={"landng": resource(tmp_path)}),
        lease_queue_definitions(queue="landing"),
    )


def unknown_asset(tmp_path: Path) -> None:
    merged(lease_queue_definitions(queue="landing", asset="bronze", resource=resource(tmp_path)))


@pytest.mark.parametrize(
    ("define", "words"),
    [
        (clash_with_an_asset, r"queues.*landing"),
        (same_queue_twice, r"landing"),
        (unknown_queue, r"'landing'.*not provided"),
        (unknown_asset, r"bronze"),
    ],
)
def test_what_clashes_or_is_missing_is_refused_when_definitions_load(
    define: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    with pytest.raises(dg.DagsterError) as caught:
        define(tmp_path)
    told = "".join(str(error) for error in (caught.value, caught.value.__cause__) if error)
    assert re.search(words, told), told


def test_the_package_is_registered_and_its_names_are_few() -> None:
    assert DagsterLibraryRegistry.get()["omnirelay-dagster"] == omnirelay_dagster.__version__
    assert len(omnirelay_dagster.__all__) <= 15
    assert all(getattr(omnirelay_dagster, name).__doc__ for name in omnirelay_dagster.__all__)
    assert Path(omnirelay_dagster.__file__).with_name("py.typed").exists()
