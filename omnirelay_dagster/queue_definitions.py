"""Everything around one queue in one call: its asset, checks, sensors and operator jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from omnirelay_dagster.checks import DEFAULT_MAX_LAG, build_queue_checks
from omnirelay_dagster.look import queue_asset_key
from omnirelay_dagster.operator_jobs import build_operator_jobs
from omnirelay_dagster.queue_asset import build_observation_sensor, build_queue_asset
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.sensors import (
    build_backpressure_sensor,
    build_relay_sensor,
    build_replication_sensor,
    build_run_status_sensors,
    build_work_sensor,
)
from omnirelay_dagster.sensors.declaring import check_queue, check_whole, wrong
from omnirelay_dagster.sensors.work_partitions import checked_partitions

Target = (
    dg.AssetsDefinition
    | dg.AssetSelection
    | dg.AssetKey
    | str
    | dg.JobDefinition
    | UnresolvedAssetJobDefinition
    | Sequence[dg.AssetsDefinition | dg.AssetKey | str]
)
Arguments = Mapping[str, Any]


def lease_queue_definitions(
    *,
    queue: str,
    asset: Target | None = None,
    resource: LeaseQueueResource | None = None,
    asset_key: dg.AssetKey | Sequence[str] | str | None = None,
    group_name: str = "queues",
    max_lag: int = DEFAULT_MAX_LAG,
    observe_every: int = 30,
    default_status: dg.DefaultSensorStatus | None = None,
    work: Arguments | None = None,
    run_status: Arguments | None = None,
    backpressure: Arguments | None = None,
    replication: Arguments | None = None,
    relay: Arguments | None = None,
) -> dg.Definitions:
    """What the UI shows of the resource ``queue``, and what keeps it going. Merge it with your own definitions.

    That is an external asset with its observation sensor and checks, four jobs for operators, the sensors that hand
    back the leases of dead runs and, for ``asset``, the sensor that launches runs while there is work. ``asset`` may
    be a leased asset, several, their keys, a selection or a job; it is launched, not defined, by this.

    ``work`` and ``run_status`` are further arguments for the sensors of that name. ``backpressure``, ``replication``
    and ``relay`` are too, and those sensors exist only if asked for. ``resource`` defines the queue along with
    the rest, for those who do not define it themselves. ``asset_key`` and ``group_name`` say where the queue's asset
    is, by default at ``queues/<queue>``. ``max_lag`` is how many events a registered reader of the log may be behind,
    ``observe_every`` the seconds between observations, ``default_status`` whether sensors are on from the start.

    Every name carries the queue's, so that the definitions of several queues go together. What cannot work is refused
    here, in words that say what to change.
    """
    key = queue_asset_key(check_queue(queue)) if asset_key is None else dg.AssetKey.from_coercible(asset_key)
    check_whole("max_lag", max_lag, 0)
    check_whole("observe_every", observe_every, 1)
    if resource is not None and not isinstance(resource, LeaseQueueResource):
        raise wrong("resource", f"must be a LeaseQueueResource, not {type(resource).__name__}")
    if asset is None and work is not None:
        raise wrong("work", "is for the sensor that launches runs of an asset; pass asset= as well")
    status = {} if default_status is None else {"default_status": default_status}
    sensors = [
        build_observation_sensor(
            queue, asset_key=key, max_lag=max_lag, minimum_interval_seconds=observe_every, **status
        )
    ]
    target = None if asset is None else _target(queue, asset, key)
    if target is not None:
        sensors.append(_work_sensor(queue, asset, target, _arguments("work", build_work_sensor, work, status)))
    sensors += _more_sensors(queue, status, run_status, backpressure, replication, relay)
    return dg.Definitions(
        assets=[build_queue_asset(queue, asset_key=key, group_name=group_name)],
        asset_checks=[build_queue_checks(queue, asset_key=key, max_lag=max_lag)],
        sensors=sensors,
        jobs=build_operator_jobs(queue),
        resources=None if resource is None else {queue: resource},
    )


def _target(queue: str, asset: Target, queue_key: dg.AssetKey) -> Any:
    """What the work sensor launches. Assets go by their keys, so that nothing is defined a second time."""
    if isinstance(asset, dg.AssetSelection | dg.JobDefinition | UnresolvedAssetJobDefinition):
        return asset
    # a key happens to be a tuple as well
    many = isinstance(asset, list | tuple) and not isinstance(asset, dg.AssetKey)
    several: list[Any] = list(asset) if many else [asset]  # type: ignore[arg-type]
    keys = [key for each in several for key in _keys(queue, each)]
    if not keys:
        raise wrong("asset", "names no asset; leave it out, or pass the asset that works on the queue")
    if queue_key in keys:
        raise wrong(
            "asset_key",
            f"{queue_key.to_user_string()!r} is the key of the asset that works on the queue; the queue's "
            f"own asset needs another one, such as {queue_asset_key(queue).to_user_string()!r}",
        )
    return dg.AssetSelection.assets(*keys)


def _keys(queue: str, asset: Any) -> Iterable[dg.AssetKey]:
    if isinstance(asset, str):
        return [dg.AssetKey.from_user_string(asset)]
    if isinstance(asset, dg.AssetKey):
        return [asset]
    if not isinstance(asset, dg.AssetsDefinition):
        raise wrong("asset", f"must be an asset, its key, a selection or a job, not {type(asset).__name__}")
    if queue not in asset.required_resource_keys:
        name = ", ".join(sorted(key.to_user_string() for key in asset.keys))
        uses = ", ".join(sorted(asset.required_resource_keys - {"io_manager"})) or "none"
        raise wrong(
            "asset",
            f"{name} does not use the queue {queue!r} (its resources: {uses}); decorate it with "
            f"@leased_asset(queue={queue!r}), or name the queue that it works on",
        )
    return asset.keys


def _work_sensor(queue: str, asset: Any, target: Any, arguments: dict[str, Any]) -> dg.SensorDefinition:
    """The sensor that launches runs; assets that lease by partition tell it which partitions there are."""
    arguments["partitions_def"] = checked_partitions(
        asset, arguments.get("partition_key"), arguments.get("partitions_def")
    )
    return build_work_sensor(queue, target=target, **arguments)


def _more_sensors(
    queue: str,
    status: Arguments,
    run_status: Arguments | None,
    backpressure: Arguments | None,
    replication: Arguments | None,
    relay: Arguments | None,
) -> list[dg.SensorDefinition]:
    found = list(
        build_run_status_sensors(queue, **_arguments("run_status", build_run_status_sensors, run_status, status))
    )
    if backpressure is not None:
        arguments = _arguments("backpressure", build_backpressure_sensor, backpressure, status)
        found.append(build_backpressure_sensor(queue, **arguments))
    if replication is not None:
        arguments = _arguments("replication", build_replication_sensor, replication, status)
        found.append(build_replication_sensor(queue, **arguments))
    if relay is not None:
        found.append(build_relay_sensor(queue, **_arguments("relay", build_relay_sensor, relay, status)))
    return found


def _arguments(where: str, build: Callable[..., Any], given: Arguments | None, status: Arguments) -> dict[str, Any]:
    """The arguments for one of the sensors, if it takes them."""
    if not isinstance(given or {}, Mapping):
        raise wrong(where, f"must be a mapping of arguments for {build.__name__}, not {type(given).__name__}")
    known = [name for name in inspect.signature(build).parameters if name not in ("queue", "target")]
    for name in given or {}:
        if name not in known:
            raise wrong(where, f"{name!r} is no argument of {build.__name__}; it takes {', '.join(known)}")
    return {**status, **(given or {})}
