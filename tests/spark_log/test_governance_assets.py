"""The governance tables in Dagster: a step that brings all four up to date, and pruning that waits for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource

from lease_core import WorkItem
from lease_core.errors import InvalidInput
from omnirelay_dagster import LeaseQueueResource
from omnirelay_dagster.spark.governance import governance_assets, read_table
from tests.spark_log.test_archive import archive, prune


def test_a_run_brings_the_tables_up_to_date(spark: Any, tmp_path: Path) -> None:
    """All that there was: the first events are in the archive only."""
    resource = LeaseQueueResource(url=f"sqlite:///{tmp_path / 'queue.db'}", namespace="landing")
    kept = (tmp_path / "archive").as_uri()
    tables = governance_assets(queue="landing", storage=tmp_path / "tables", reader="governance", archive=kept)
    resources = {"landing": resource, "spark": LazyPySparkResource(spark_config={})}
    assert {key.to_user_string() for key in tables.keys} == {
        f"governance/landing/{name}" for name in ("item_history", "peer_activity", "lease_latency", "anomalies")
    }
    with resource.get_queue() as queue:
        queue.enqueue([WorkItem("file", str(n)) for n in range(5)])
        assert prune(queue, archive(queue, tmp_path / "archive")) == 5
        queue.drop_reader("relay/objects")
        queue.complete([lease.token for lease in queue.lease("worker", 2)])
    with dg.instance_for_test() as instance:
        result = dg.materialize([tables], resources=resources, instance=instance)
        told = result.asset_materializations_for_node("landing_governance")
    assert [each.metadata["watermark"].value for each in told] == [9] * 4
    assert read_table(spark, tmp_path / "tables", "item_history").count() == 5
    with LeaseQueueResource(url=resource.url, namespace="landing").get_queue() as queue:
        assert queue.readers() == {"governance": 9}
        queue.enqueue([WorkItem("file", "late")])
        assert queue.prune_events(before=1000) == 9


def test_a_storage_that_cannot_be_is_refused_at_load() -> None:
    with pytest.raises(InvalidInput, match="storage: is 's3://bucket/x'"):
        governance_assets(queue="landing", storage="s3://bucket/x")
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="max_events"):
        governance_assets(queue="landing", storage="x", max_events=0)
