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
    build_run_status_sensors    hands back what dead runs hold
    build_observation_sensor    shows the queue's numbers, leases and health in the UI
"""

from importlib.metadata import version

from dagster_shared.libraries import DagsterLibraryRegistry

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
    build_replication_sensor,
    build_run_status_sensors,
    build_work_sensor,
)

__version__ = version("omnirelay-dagster")

DagsterLibraryRegistry.register("omnirelay-dagster", __version__, is_dagster_package=False)

__all__ = [
    "FencedIOManager",
    "LeaseQueueComponent",
    "LeaseQueueResource",
    "LeasedBatch",
    "build_backpressure_sensor",
    "build_observation_sensor",
    "build_replication_sensor",
    "build_run_status_sensors",
    "build_work_sensor",
    "check_definitions",
    "lease_batch",
    "lease_queue_definitions",
    "leased_asset",
    "leased_op",
]
