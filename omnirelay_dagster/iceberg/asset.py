"""Iceberg tables in Dagster: the catalog as a resource, the table as an asset, and a sensor that keeps it fresh."""

# without `from __future__ import annotations`: Dagster reads the types of resource fields
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus as Status
from pydantic import Field, PrivateAttr

from lease_core import LeaseError
from lease_core.store import parse
from omnirelay_dagster.iceberg.catalog import open_catalog
from omnirelay_dagster.iceberg.schema_drift import evolution
from omnirelay_dagster.iceberg.table import Commit, CommitReport, IcebergTable
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.sensors.declaring import check_name, check_seconds, check_timing, check_whole, wrong
from omnirelay_dagster.sensors.liveness import last_heard_of

SENSOR_TAG = "omnirelay/iceberg_sensor"
_UNFINISHED = [Status.QUEUED, Status.NOT_STARTED, Status.STARTING, Status.STARTED, Status.CANCELING]
_MOST_RUNS = 100
_DETAILS = "omnirelay/iceberg"


class IcebergCatalogResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A catalog of Iceberg tables, kept in SQLite or, for many machines, in PostgreSQL."""

    url: str = Field(description="sqlite:///path/catalog.db or postgresql://user@host/db")
    warehouse: str = Field(description="where tables go: a folder, or an address such as s3://bucket/prefix")
    name: str = Field("default", description="the catalog's name within the database")
    properties: dict[str, str] = Field({}, description="settings of pyiceberg, such as s3.endpoint")

    _catalog: Any = PrivateAttr(None)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        try:
            if not isinstance(self.url, dg.EnvVar):
                parse(self.url)
        except LeaseError as error:
            raise dg.DagsterInvalidDefinitionError(f"IcebergCatalogResource: {error}") from error

    def get_catalog(self) -> Any:
        """pyiceberg's catalog, opened the first time it is asked for."""
        if self._catalog is None:
            self._catalog = open_catalog(self.url, self.warehouse, name=self.name, properties=self.properties)
        return self._catalog

    def table(self, name: str, **options: Any) -> IcebergTable:
        """A table of the catalog; ``options`` are those of ``IcebergTable``."""
        return IcebergTable(name, self.get_catalog(), **options)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None


def iceberg_table_asset(
    table: str,
    *,
    source: Any,
    catalog: str = "catalog",
    io_manager: str = "fenced",
    key: Any = None,
    schema: Any = None,
    partition_by: str | Iterable[str] = (),
    evolve: Iterable[str] | bool = (),
    keep_snapshots: int = 25,
    batches_per_commit: int = 100,
    tidy_older_than: float | None = 86_400.0,
    group_name: str | None = None,
    description: str | None = None,
    automation_condition: dg.AutomationCondition[Any] | None = None,
    tags: Mapping[str, str] | None = None,
) -> dg.AssetsDefinition:
    """An asset that is the Iceberg table ``table`` of what ``source``, a leased asset, has published.

    Materializing it commits every published batch that is not in the table yet, once and in the order of the log; a run
    that dies on the way leaves the rest to the next. ``catalog`` and ``io_manager`` are the keys of an
    ``IcebergCatalogResource`` and of the ``FencedIOManager`` that stores the source. What else can be said of the table
    is as in ``IcebergTable``. After that, what nobody needs in the table's folder is removed if it is older than
    ``tidy_older_than`` seconds; ``None`` leaves that to you.
    """
    upstream = _key_of(source)
    options = {
        "schema": schema,
        "partition_by": [partition_by] if isinstance(partition_by, str) else list(partition_by),
        "evolve": sorted(evolution(evolve)),
        "keep_snapshots": check_whole("keep_snapshots", keep_snapshots, 1),
    }
    check_whole("batches_per_commit", batches_per_commit, 1)
    asset_key = dg.AssetKey(table.split(".")) if key is None else dg.AssetKey.from_coercible(key)

    @dg.asset(
        key=asset_key,
        deps=[upstream],
        required_resource_keys={catalog, io_manager},
        group_name=group_name,
        description=description
        or f"The Iceberg table `{table}`, fed from what `{upstream.to_user_string()}` published.",
        automation_condition=automation_condition,
        tags=tags,
        kinds={"iceberg"},
        metadata={
            "dagster/table_name": table,
            _DETAILS: {
                "table": table,
                "source": upstream.to_escaped_user_string(),
                "catalog": catalog,
                "io_manager": io_manager,
            },
        },
    )
    def committed(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        source = _fenced(context.resources, io_manager)
        there = getattr(context.resources, catalog).table(table, **options)

        def say(commit: Commit) -> None:
            context.log.info(
                f"{table}: {commit.batches} batches, {commit.rows} rows in {commit.files} files; snapshot "
                f"{commit.snapshot_id}, the log is in up to number {commit.sequence}"
            )

        report = there.commit_published(source, upstream, batches_per_commit=batches_per_commit, progress=say)
        removed = 0 if tidy_older_than is None else len(there.tidy(tidy_older_than))
        return dg.MaterializeResult(metadata=_metadata(report, removed))

    return committed


def _key_of(source: Any) -> dg.AssetKey:
    if isinstance(source, dg.AssetsDefinition | dg.SourceAsset | dg.AssetSpec):
        return source.key
    return dg.AssetKey.from_user_string(source) if isinstance(source, str) else dg.AssetKey.from_coercible(source)


def _fenced(resources: Any, key: str) -> FencedIOManager:
    found = getattr(resources, key)
    if not isinstance(found, FencedIOManager):
        raise dg.DagsterInvariantViolationError(
            f"io_manager: the resource {key!r} is a {type(found).__name__}; an Iceberg table takes what a "
            "FencedIOManager has published, so name the one that stores its source"
        )
    return found


def _metadata(report: CommitReport, removed: int) -> dict[str, Any]:
    """The same keys every time, so that each of them plots."""
    return {
        "dagster/row_count": report.total_rows,
        "omnirelay/snapshot_id": dg.MetadataValue.text(str(report.snapshot_id)),  # too large a number for a browser
        "omnirelay/sequence_number": report.sequence,
        "omnirelay/batches": report.batches,
        "omnirelay/rows": report.rows,
        "omnirelay/files": report.files,
        "omnirelay/files_rewritten": report.rewritten,
        "omnirelay/commits": report.commits,
        "omnirelay/total_files": report.total_files,
        "omnirelay/files_tidied": removed,
    }


def build_iceberg_sensor(
    table_asset: dg.AssetsDefinition,
    *,
    name: str | None = None,
    ignore_silent_runs_after: float = 600.0,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that materializes an ``iceberg_table_asset`` while published batches wait for it.

    It goes by the log and the table's own mark, not by Dagster's events: a batch whose run died right after
    publishing is seen as well. One run at a time; one that was not heard of for ``ignore_silent_runs_after`` seconds is
    taken for dead, which at worst lets two of them commit at once, and that is safe.
    """
    details = table_asset.metadata_by_key[table_asset.key].get(_DETAILS)
    if details is None:
        raise wrong("table_asset", "must be what iceberg_table_asset(...) gave")
    found: dict[str, str] = details.value if isinstance(details, dg.MetadataValue) else details
    name = check_name(name, f"{table_asset.key.to_python_identifier()}_iceberg_sensor")
    check_timing(minimum_interval_seconds, default_status)
    patience = timedelta(seconds=check_seconds("ignore_silent_runs_after", ignore_silent_runs_after))

    def tick(context: dg.SensorEvaluationContext, **_: Any) -> dg.SensorResult:
        table = getattr(context.resources, found["catalog"]).table(found["table"])
        waiting = table.waiting(_fenced(context.resources, found["io_manager"]), found["source"])
        runs = _at_work(context.instance, name, patience)
        cursor = json.dumps({"batches_waiting": waiting, "runs": runs})
        if not waiting:
            return dg.SensorResult(skip_reason="all that is published is in the table", cursor=cursor)
        if runs:
            return dg.SensorResult(skip_reason=f"{waiting} batches wait, and a run is at work", cursor=cursor)
        return dg.SensorResult(run_requests=[dg.RunRequest(tags={SENSOR_TAG: name})], cursor=cursor)

    return dg.SensorDefinition(
        name=name,
        evaluation_fn=tick,
        required_resource_keys={found["catalog"], found["io_manager"]},
        target=table_asset,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Commits to {found['table']} what {found['source']} has published.",
    )


def _at_work(instance: dg.DagsterInstance, name: str, patience: timedelta) -> int:
    records = instance.get_run_records(dg.RunsFilter(tags={SENSOR_TAG: name}, statuses=_UNFINISHED), limit=_MOST_RUNS)
    now = datetime.now(UTC)
    heard = [(last_heard_of(instance, each.dagster_run.run_id), each.create_timestamp) for each in records]
    return sum(now - (last or created.astimezone(UTC)) <= patience for last, created in heard)
