"""Everything that sensors change in a Dagster instance: pool limits, other sensors, dead runs, a line of memory.

Most of it is not in Dagster's public interface, so all of it is here and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import dagster as dg
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus
from dagster._time import get_current_timestamp

# Pools


class PoolSetting(NamedTuple):
    """A pool's limit. ``None`` is no limit of its own; ``from_default``: the instance's default, filled in."""

    limit: int | None
    from_default: bool = False


def pool_setting(instance: dg.DagsterInstance, pool: str) -> PoolSetting:
    for known in instance.event_log_storage.get_pool_limits():
        if known.name == pool:
            return PoolSetting(known.limit, bool(known.from_default))
    return PoolSetting(None)


def set_pool_limit(instance: dg.DagsterInstance, pool: str, limit: int) -> None:
    storage = instance.event_log_storage
    if not storage.supports_global_concurrency_limits:
        raise dg.DagsterInvariantViolationError(
            f"the instance's event log storage ({type(storage).__name__}) knows no pools: leave pool_limits out"
        )
    storage.set_concurrency_slots(pool, limit)


def restore_pool(instance: dg.DagsterInstance, pool: str, before: PoolSetting) -> None:
    """Give the pool back the setting it had."""
    storage = instance.event_log_storage
    if before.limit is not None and not before.from_default:
        storage.set_concurrency_slots(pool, before.limit)
        return
    storage.delete_concurrency_limit(pool)
    if before.from_default:
        storage.initialize_concurrency_limit_to_default(pool)


# Sensors


class SensorSetting(NamedTuple):
    """Whether a sensor runs. ``started_at`` changes whenever somebody starts it.

    ``known`` is whether the instance has a state for it, which it has from the first look that the daemon takes.
    """

    status: str
    running: bool
    started_at: float | None = None
    known: bool = True


def sensor_setting(context: dg.SensorEvaluationContext, name: str) -> SensorSetting | None:
    """The state of the sensor ``name`` in the code location of ``context``, or None if there is no such sensor."""
    stored = _stored_sensor(context, name)
    default = _runs_by_default(context, name)
    if stored is None:
        if default is None:
            return None
        return SensorSetting(InstigatorStatus.DECLARED_IN_CODE.value, default, known=False)
    in_code = stored.status == InstigatorStatus.DECLARED_IN_CODE
    data = stored.sensor_instigator_data
    running = default is not False if in_code else stored.status == InstigatorStatus.RUNNING
    return SensorSetting(stored.status.value, running, data.last_sensor_start_timestamp if data else None)


def stop_sensor(context: dg.SensorEvaluationContext, name: str) -> None:
    """Stop a sensor, as the switch in the UI does. What it has read so far (its cursor) stays."""
    _set_sensor(context, name, InstigatorStatus.STOPPED)


def restore_sensor(context: dg.SensorEvaluationContext, name: str, before: SensorSetting) -> None:
    """Let a sensor run again, in the way it did: switched on by somebody, or by its default."""
    _set_sensor(context, name, InstigatorStatus(before.status))


def _set_sensor(context: dg.SensorEvaluationContext, name: str, status: InstigatorStatus) -> None:
    stored = _stored_sensor(context, name)
    if stored is None:
        # only the daemon may add it: were it added here, the daemon would fail to do so at the same time
        raise dg.DagsterInvariantViolationError(f"the instance knows no sensor {name!r} yet")
    if status == InstigatorStatus.RUNNING and stored.sensor_instigator_data is not None:
        started = stored.sensor_instigator_data.with_sensor_start_timestamp(get_current_timestamp())
        stored = stored.with_data(started)
    context.instance.update_instigator_state(stored.with_status(status))


def _runs_by_default(context: dg.SensorEvaluationContext, name: str) -> bool | None:
    repository = context.repository_def
    if repository is None or not repository.has_sensor_def(name):
        return None
    return bool(repository.get_sensor_def(name).default_status == dg.DefaultSensorStatus.RUNNING)


def _stored_sensor(context: dg.SensorEvaluationContext, name: str) -> InstigatorState | None:
    here = context.code_location_origin.location_name if context.code_location_origin else None
    found = [
        state
        for state in context.instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
        if state.name == name
        and (here is None or state.origin.repository_origin.code_location_origin.location_name == here)
        and context.repository_name in (None, state.origin.repository_origin.repository_name)
    ]
    if len(found) > 1:
        raise dg.DagsterInvariantViolationError(f"more than one sensor is called {name!r}")
    return found[0] if found else None


# Runs


def fail_run(instance: dg.DagsterInstance, run: dg.DagsterRun, why: str) -> None:
    """Report a run failed that nobody else will report on, and free the pool slots it holds."""
    instance.report_run_failed(run, why)
    storage = instance.event_log_storage
    if storage.supports_global_concurrency_limits:
        storage.free_concurrency_slots_for_run(run.run_id)


# Memory


def remember(instance: dg.DagsterInstance, key: str, text: str) -> None:
    """Keep a text in the instance at once, where a sensor's cursor would be kept only once its tick has ended."""
    instance.daemon_cursor_storage.set_cursor_values({key: text})


def recall(instance: dg.DagsterInstance, key: str) -> str:
    """What was remembered last, or an empty text."""
    return instance.daemon_cursor_storage.get_cursor_values({key}).get(key, "")
