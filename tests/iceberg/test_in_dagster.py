"""Iceberg tables as Dagster assets: downstream of a leased asset, with numbers that plot, launched by a sensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest

from lease_core import WorkItem
from omnirelay_dagster import FencedIOManager, LeaseQueueResource, leased_asset
from omnirelay_dagster.iceberg import IcebergCatalogResource, build_iceberg_sensor, iceberg_table_asset
from omnirelay_dagster.iceberg.asset import SENSOR_TAG


@leased_asset(queue="landing", io_manager_key="fenced", batch_size=2, drain=True)
def bronze_events(batch: Any) -> pd.DataFrame:
    return pd.DataFrame({"file": [item.resource_id for item in batch.items]})


events = iceberg_table_asset("lake.events", source=bronze_events, batches_per_commit=2)


@pytest.fixture
def resources(tmp_path: Path) -> Iterator[dict[str, Any]]:
    landing = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing")
    yield {
        "landing": landing,
        "fenced": FencedIOManager(base_path=str(tmp_path / "out"), queue=landing),
        "catalog": IcebergCatalogResource(url=f"sqlite:///{tmp_path}/catalog.db", warehouse=str(tmp_path / "lake")),
    }
    landing.get_queue().close()


def enqueue(resources: dict[str, Any], *names: str) -> None:
    resources["landing"].get_queue().enqueue([WorkItem("file", name) for name in names])


def test_the_table_follows_its_leased_asset(resources: dict[str, Any]) -> None:
    enqueue(resources, *"abcde")
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([bronze_events, events], resources=resources, instance=instance)
        [materialization] = result.asset_materializations_for_node("lake__events")
        shown = {name: value.value for name, value in materialization.metadata.items()}
        table = resources["catalog"].table("lake.events")
        assert sorted(table.scan().to_arrow()["file"].to_pylist()) == list("abcde")
        assert shown["omnirelay/snapshot_id"] == str(table.load().current_snapshot().snapshot_id)
        assert shown["omnirelay/sequence_number"] == table.watermark("landing").sequence
        numbers = ("dagster/row_count", "omnirelay/rows", "omnirelay/files", "omnirelay/batches", "omnirelay/commits")
        assert [shown[name] for name in numbers] == [5, 5, 3, 3, 2]

        again = dg.materialize([bronze_events, events], resources=resources, selection=[events], instance=instance)
        [materialization] = again.asset_materializations_for_node("lake__events")
        assert [materialization.metadata[name].value for name in numbers] == [5, 0, 0, 0, 0]
        assert set(materialization.metadata) == set(shown)


def test_the_sensor_launches_while_batches_wait_and_one_run_at_a_time(resources: dict[str, Any]) -> None:
    sensor = build_iceberg_sensor(events)
    assert sensor.name == "lake__events_iceberg_sensor"
    definitions = dg.Definitions(assets=[bronze_events, events], sensors=[sensor], resources=resources)
    with dg.DagsterInstance.ephemeral() as instance:

        def tick() -> Any:
            with dg.build_sensor_context(instance, resources=resources, definitions=definitions) as context:
                return sensor(context)

        assert "all that is published" in str(tick().skip_reason.skip_message)
        enqueue(resources, "a")
        # the run that published it has died before Dagster could note it: nothing but the log says that it is there
        dg.materialize([bronze_events], resources=resources, instance=dg.DagsterInstance.ephemeral())
        [request] = tick().run_requests
        assert request.run_key is None

        job = definitions.resolve_implicit_global_asset_job_def()
        run = instance.create_run_for_job(job, tags=request.tags, status=dg.DagsterRunStatus.STARTED)
        assert run.tags[SENSOR_TAG] == sensor.name
        assert "a run is at work" in str(tick().skip_reason.skip_message)
        instance.delete_run(run.run_id)
        dg.materialize([bronze_events, events], selection=[events], resources=resources, instance=instance)
        assert not tick().run_requests
        with dg.build_sensor_context(instance, resources=resources, definitions=definitions) as context:
            evaluated = sensor.evaluate_tick(context)  # as the daemon does
        assert json.loads(evaluated.cursor or "") == {"batches_waiting": 0, "runs": 0}


def test_wrong_resources_and_settings_are_named(resources: dict[str, Any]) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="url"):
        IcebergCatalogResource(url="mysql://x/y", warehouse="lake")
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="iceberg_table_asset"):
        build_iceberg_sensor(bronze_events)
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="keep_snapshots"):
        iceberg_table_asset("lake.x", source="bronze_events", keep_snapshots=0)
    wrong = iceberg_table_asset("lake.x", source="bronze_events", io_manager="landing")
    with dg.DagsterInstance.ephemeral() as instance:
        result = dg.materialize([wrong], resources=resources, instance=instance, raise_on_error=False)
    [failure] = result.get_step_failure_events()
    error = failure.step_failure_data.error
    assert error is not None
    assert "FencedIOManager" in f"{error} {error.cause}"


def test_a_password_is_in_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lease_core.errors import StoreUnavailable
    from omnirelay_dagster.iceberg import catalog

    monkeypatch.setattr(catalog, "_PATIENCE", 0.0)
    with pytest.raises(StoreUnavailable) as refused:
        catalog.open_catalog("postgresql://me:s3cret@127.0.0.1:1/db", tmp_path)
    assert "s3cret" not in f"{refused.value!r} {refused.value.__cause__!r}"
    assert "127.0.0.1" in str(refused.value)
