"""Which partitions the runs of a work sensor are for: none, one that is given, or those that have items waiting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dagster as dg

from omnirelay_dagster.requirements import use_of
from omnirelay_dagster.sensors.declaring import wrong
from omnirelay_dagster.sensors.dynamic_partitions import NOT_IN_KEYS

Given = str | Callable[[dg.SensorEvaluationContext], str]


class Sorted(NamedTuple):
    """Waiting items by partition, the first in line first; and what is waiting under keys that are no partition."""

    known: dict[str, int]
    unknown: dict[str | None, int]


def checked_partitions(target: Any, partition_key: Any, partitions_def: Any) -> dg.PartitionsDefinition[str] | None:
    """The partitions to launch runs for by what waits, if that is how ``target`` takes its work."""
    if partition_key is not None and partitions_def is not None:
        raise wrong("partition_key, partitions_def", "give one of them, not both")
    if partition_key is not None and not (
        callable(partition_key) or (isinstance(partition_key, str) and partition_key)
    ):
        raise wrong("partition_key", f"must be a partition, or a function of the context (got {partition_key!r})")
    if partitions_def is not None and not isinstance(partitions_def, dg.PartitionsDefinition):
        raise wrong("partitions_def", f"must be a dg.PartitionsDefinition (got {partitions_def!r})")
    # keys and selections of Dagster's happen to be tuples as well
    for each in target if type(target) in (list, tuple) else [target]:
        if (use := use_of(each)) is None:
            continue
        name, own = each.node_def.name, each.partitions_def
        if partitions_def is None and use.by_partition:
            partitions_def = own
        if use.by_partition and partition_key is not None:
            raise wrong("partition_key", f"{name} leases by partition, so runs are for the partitions that have work")
        if partitions_def is not None and not use.by_partition:
            raise wrong(
                "partitions_def",
                f"{name} takes whatever is next in line; for runs that take the items of their partition declare it "
                "with @leased_asset(by_partition=True, partitions_def=...)",
            )
        if own is not None and partitions_def is None and partition_key is None:
            raise wrong(
                "partition_key",
                f"{name} has partitions, so say which its runs are for: pass partition_key=, or declare the asset with "
                "by_partition=True to have a run for each partition that has items waiting",
            )
    return partitions_def  # type: ignore[no-any-return]


def partitions_of_target(context: dg.SensorEvaluationContext, name: str) -> dg.PartitionsDefinition[str] | None:
    """The partitions of the asset that the sensor ``name`` launches, if it leases by partition.

    For targets that are only named (a key, a selection, a job): what they are is known once all is loaded.
    """
    repository = context.repository_def
    if repository is None or not repository.has_sensor_def(name):
        return None
    sensor = repository.get_sensor_def(name)
    assets = [
        each
        for target in sensor.targets
        for each in repository.get_job(target.job_name).asset_layer.asset_graph.assets_defs
    ]
    if sensor.asset_selection is not None:
        graph = repository.asset_graph
        assets += [graph.get(key).assets_def for key in sensor.asset_selection.resolve(graph)]
    found = (each.partitions_def for each in assets if (use := use_of(each)) is not None and use.by_partition)
    return next(found, None)


def resolved(partition_key: Given | None, context: dg.SensorEvaluationContext) -> str | None:
    """The partition that runs launched now are for."""
    if not callable(partition_key):
        return partition_key
    found = partition_key(context)
    if not isinstance(found, str) or not found:
        raise dg.DagsterInvariantViolationError(f"partition_key gave {found!r}; it must give the key of a partition")
    return found


def sort_out(
    waiting: Mapping[str | None, int], partitions: dg.PartitionsDefinition[str], instance: dg.DagsterInstance
) -> Sorted:
    """Tell the keys that are partitions from those that are not. Dynamic partitions take any key Dagster does."""
    found = Sorted({}, {})
    with dg.partition_loading_context(dynamic_partitions_store=instance):
        for key, count in waiting.items():
            if key is not None and _is_partition(key, partitions):
                found.known[key] = count
            else:
                found.unknown[key] = count
    return found


def _is_partition(key: str, partitions: dg.PartitionsDefinition[str]) -> bool:
    if isinstance(partitions, dg.DynamicPartitionsDefinition):
        return not NOT_IN_KEYS.search(key)
    if isinstance(partitions, dg.MultiPartitionsDefinition):
        return key in partitions.get_partition_keys()
    return partitions.has_partition_key(key)


def dynamic_name(partitions: dg.PartitionsDefinition[str] | None) -> str | None:
    """The name of partitions that are dynamic, so that keys can be added to them."""
    return partitions.name if isinstance(partitions, dg.DynamicPartitionsDefinition) else None
