"""OmniRelay for Dagster: assets, ops and sensors that work from a durable lease queue.

The queue itself lives in `lease_core` and knows nothing of Dagster. This package is what a Dagster project imports:
it leases work for a run, keeps the leases alive while the run works, and completes them once the output is stored.

    LeaseQueueResource          the queue, for assets, ops, sensors and schedules
    leased_asset, leased_op     compute functions that work on leased batches
    lease_batch, LeasedBatch    the same as a context manager, and what a body gets
    FencedIOManager             outputs that only a lease that still holds can publish
    lease_queue_definitions     a queue's asset, checks, sensors and operator jobs, in one call
    LeaseQueueComponent         the same from YAML
    check_definitions           refuses at load what would otherwise fail at run time
    build_work_sensor           launches runs while there is work
    build_backpressure_sensor   holds back whatever feeds the queue while it is too deep
    build_replication_sensor    turns the queue's log into asset materializations
    build_relay_sensor          delivers the queue's log to sinks
    build_run_status_sensors    hands back what dead runs hold
    build_observation_sensor    shows the queue's numbers, leases and health in the UI
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dagster_shared.libraries import DagsterLibraryRegistry

if TYPE_CHECKING:
    from omnirelay_dagster.asset_decorator import leased_asset, leased_op
    from omnirelay_dagster.batch import LeasedBatch, lease_batch
    from omnirelay_dagster.component import LeaseQueueComponent
    from omnirelay_dagster.io_manager import FencedIOManager
    from omnirelay_dagster.queue_asset import build_observation_sensor
    from omnirelay_dagster.queue_definitions import lease_queue_definitions
    from omnirelay_dagster.requirements import check_definitions
    from omnirelay_dagster.resource import LeaseQueueResource
    from omnirelay_dagster.sensors import (
        build_backpressure_sensor,
        build_relay_sensor,
        build_replication_sensor,
        build_run_status_sensors,
        build_work_sensor,
    )

__version__ = version("omnirelay-dagster")

DagsterLibraryRegistry.register("omnirelay-dagster", __version__, is_dagster_package=False)

# Names are loaded when they are first asked for: Spark's workers import modules of this package without Dagster, which
# would take each of them seconds to load.
_HOMES = {
    "FencedIOManager": "io_manager",
    "LeaseQueueComponent": "component",
    "LeaseQueueResource": "resource",
    "LeasedBatch": "batch",
    "build_backpressure_sensor": "sensors",
    "build_observation_sensor": "queue_asset",
    "build_relay_sensor": "sensors",
    "build_replication_sensor": "sensors",
    "build_run_status_sensors": "sensors",
    "build_work_sensor": "sensors",
    "check_definitions": "requirements",
    "lease_batch": "batch",
    "lease_queue_definitions": "queue_definitions",
    "leased_asset": "asset_decorator",
    "leased_op": "asset_decorator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


__all__ = [
    "FencedIOManager",
    "LeaseQueueComponent",
    "LeaseQueueResource",
    "LeasedBatch",
    "build_backpressure_sensor",
    "build_observation_sensor",
    "build_relay_sensor",
    "build_replication_sensor",
    "build_run_status_sensors",
    "build_work_sensor",
    "check_definitions",
    "lease_batch",
    "lease_queue_definitions",
    "leased_asset",
    "leased_op",
]
