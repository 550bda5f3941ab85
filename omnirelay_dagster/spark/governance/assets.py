"""The governance tables as Dagster assets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from omnirelay_dagster.look import queue_asset_key
from omnirelay_dagster.sensors.declaring import check_queue, check_whole
from omnirelay_dagster.spark.governance.folding import Thresholds
from omnirelay_dagster.spark.governance.stored import Storage
from omnirelay_dagster.spark.governance.updating import Update, bring_up_to_date
from omnirelay_dagster.spark.log_reading import open_log

TABLES = {
    "item_history": "Every item's life: waits, processing time, attempts, outcome.",
    "peer_activity": "Who touched which resource, when, under which principal, by hour.",
    "lease_latency": "Percentiles of queue wait and processing time, by hour.",
    "anomalies": "Peers whose failure or expiry rate stands out, and resources that keep bouncing.",
}


def governance_assets(
    *,
    queue: str,
    storage: str | Path,
    spark: str = "spark",
    key_prefix: str | list[str] | None = None,
    group_name: str = "governance",
    reader: str | None = None,
    archive: str | None = None,
    max_events: int = 2_000_000,
    thresholds: Thresholds | None = None,
) -> dg.AssetsDefinition:
    """Four assets over the log of the resource ``queue``, brought up to date together by one step.

    They always agree: one manifest in the folder ``storage`` publishes all of them with the number of the last event
    that went into them. A run reads only what is new; a run that finds nothing changes nothing; a run that dies is
    made up for by the next. ``spark`` is the key of a ``PySparkResource`` or ``LazyPySparkResource``. With ``reader``
    pruning the log waits for these tables under that name. What was pruned all the same is read from ``archive``, the
    address of the log's archive in an object store; without one, a log that was pruned too early is an error.
    """
    check_queue(queue)
    check_whole("max_events", max_events, 1)
    Storage(storage)
    prefix = [key_prefix] if isinstance(key_prefix, str) else key_prefix or ["governance", queue]
    specs = [
        dg.AssetSpec(
            dg.AssetKey([*prefix, name]),
            deps=[queue_asset_key(queue)],
            description=description,
            group_name=group_name,
            kinds={"spark", "parquet"},
            metadata={"omnirelay/resource": queue},
        )
        for name, description in TABLES.items()
    ]

    @dg.multi_asset(name=f"{queue}_governance", specs=specs, required_resource_keys={queue, spark})
    def governance(context) -> Iterator[dg.MaterializeResult]:  # type: ignore[no-untyped-def, type-arg]
        resource = getattr(context.resources, queue)
        session = getattr(context.resources, spark).spark_session
        if reader is not None:
            resource.get_queue().register_reader(reader, after=_read_so_far(resource, storage, archive is not None))
        update = bring_up_to_date(
            session,
            url=resource.url,
            namespace=resource.namespace,
            storage=storage,
            archive=archive,
            max_events=max_events,
            thresholds=thresholds,
            log=context.log.info,
        )
        if reader is not None:
            resource.get_queue().advance_reader(reader, update.manifest.watermark)
        for spec in specs:
            yield dg.MaterializeResult(asset_key=spec.key, metadata=_metadata(spec.key.path[-1], update, storage))

    return governance


def _read_so_far(resource: Any, storage: str | Path, archived: bool) -> int:
    """The last event that the tables need no more from the log itself: where they stand or, before the first run or if
    there is an archive, what was pruned."""
    manifest = Storage(storage).current()
    if manifest is not None and not archived:
        return manifest.watermark
    with open_log(resource.url, resource.namespace) as log:
        return max(log.head().pruned, manifest.watermark if manifest else 0)


def _metadata(table: str, update: Update, storage: str | Path) -> dict[str, Any]:
    manifest = update.manifest
    return {
        "watermark": manifest.watermark,
        "version": manifest.version,
        "events_read": update.events,
        "steps": update.steps,
        "files": len(manifest.files(table)),
        "first_event": manifest.first,
        "storage": dg.MetadataValue.path(str(Storage(storage).folder)),
    }
