"""The backpressure sensor: holds back what feeds a queue while it is too deep, and lets go afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import dagster as dg
import msgspec

from lease_core import LeaseQueue, QueueStats
from omnirelay_dagster.sensors import instance_controls as controls
from omnirelay_dagster.sensors.declaring import (
    check_name,
    check_queue,
    check_whole,
    location_of,
    queue_sensor,
    wrong,
)

_STOPPED = "STOPPED"


class BackpressureChange(NamedTuple):
    """What the hook is told: whether backpressure is on now, the queue's name, and its numbers."""

    on: bool
    namespace: str
    stats: QueueStats


Hook = Callable[[dg.SensorEvaluationContext, BackpressureChange], object]


class PoolHold(msgspec.Struct, omit_defaults=True):
    """A pool limit that was set here, and what it was before (none at all, if ``before`` is left out)."""

    set: int
    before: int | None = None
    before_was_default: bool = False


class SensorHold(msgspec.Struct, omit_defaults=True):
    """A sensor that was stopped here, and what it was before."""

    before: str
    started_at: float | None = None


class Episode(msgspec.Struct, omit_defaults=True):
    """All that is being held back, since when. It is the cursor, so that undoing it survives any restart.

    ``later`` are sensors that the daemon has not looked at yet, so that they can't be stopped before the next tick.
    """

    backpressure: str
    since: str
    pools: dict[str, PoolHold] = {}
    sensors: dict[str, SensorHold] = {}
    later: list[str] = []
    notes: list[str] = []


class _Holding(NamedTuple):
    """What to do on the high mark."""

    name: str
    pool_limits: Mapping[str, int]
    pause_sensors: tuple[str, ...]
    on_change: Hook | None


def build_backpressure_sensor(
    queue: str,
    *,
    pool_limits: Mapping[str, int] | None = None,
    pause_sensors: Iterable[str] = (),
    on_change: Hook | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 10,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    description: str | None = None,
) -> dg.SensorDefinition:
    """A sensor that holds back upstream work while the queue at the resource key ``queue`` is above its high mark.

    On the high mark it lowers pools to ``pool_limits``, stops the sensors named in ``pause_sensors`` (of the same code
    location) and calls ``on_change(context, BackpressureChange(on=True, ...))``. On the low mark all of that is
    undone, and the hook called with ``on=False``. The marks are the queue's own (``high_watermark``,
    ``low_watermark``).

    What was set, and what it was before, is in the cursor, and in the instance before anything is changed: it is
    undone after a crash or a restart as well. A pool that is at its limit or below already is left alone, and so is a
    sensor that is stopped already. What somebody changed meanwhile stays as they left it, and the cursor says so.
    The hook is called at least once a change; if it raises, the tick fails and it is called again.
    """
    check_queue(queue)
    name = check_name(name, f"{queue}_backpressure_sensor")
    holding = _Holding(name, _check_limits(pool_limits), _check_paused(pause_sensors, name), on_change)
    if on_change is not None and not callable(on_change):
        raise wrong("on_change", f"must be a function of the context and a BackpressureChange (got {on_change!r})")
    if not (holding.pool_limits or holding.pause_sensors or on_change):
        raise wrong("pool_limits, pause_sensors, on_change", "give at least one of them, or there is nothing to do")

    return queue_sensor(
        queue,
        _tick,
        holding,
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description or f"Holds back what feeds the queue {queue!r} while it is above its high mark.",
    )


def _check_limits(limits: Any) -> dict[str, int]:
    if limits is None:
        return {}
    if not isinstance(limits, Mapping) or not all(isinstance(pool, str) and pool for pool in limits):
        raise wrong("pool_limits", f"must map pools to limits, such as {{'ingest': 1}} (got {limits!r})")
    return {pool: check_whole(f"pool_limits[{pool!r}]", limit, 0) for pool, limit in limits.items()}


def _check_paused(names: Any, own: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise wrong("pause_sensors", f"must be a list of sensor names (got {names!r})")
    listed = tuple(names)
    for name in listed:
        if not isinstance(name, str) or not name:
            raise wrong("pause_sensors", f"must be a list of sensor names; use sensor.name for a sensor (got {name!r})")
        if name == own:
            raise wrong("pause_sensors", f"{name!r} is this sensor itself; once stopped it could not start anything")
    return listed


def _tick(context: dg.SensorEvaluationContext, queue: LeaseQueue, holding: _Holding) -> dg.SensorResult:
    stats = queue.stats()
    memory = f"omnirelay/backpressure/{location_of(context) or ''}/{holding.name}"
    episode, interrupted = _current(context, memory)
    depth = f"{stats.pending} pending"
    if stats.backpressure and episode is not None and not interrupted:
        if episode.later:
            _stop_late(context, episode, memory)
        return dg.SensorResult(skip_reason=f"backpressure goes on: {depth}", cursor=_text(episode))
    if stats.backpressure:
        begun = episode or _plan(context, holding)
        controls.remember(context.instance, memory, _text(begun))
        _hold(context, begun)
        _tell(context, queue, holding, stats, on=True)
        return dg.SensorResult(skip_reason=f"backpressure is on: {depth}. {_summary(begun)}", cursor=_text(begun))
    if episode is None:
        return dg.SensorResult(skip_reason=f"no backpressure: {depth}", cursor=context.cursor)
    left = _let_go(context, episode)
    _tell(context, queue, holding, stats, on=False)
    controls.remember(context.instance, memory, "")
    for note in left:
        context.log.warning(note)
    over = Episode("off", _now(), notes=left)
    return dg.SensorResult(skip_reason=f"backpressure is over: {depth}. {' '.join(left)}".strip(), cursor=_text(over))


def _current(context: dg.SensorEvaluationContext, memory: str) -> tuple[Episode | None, bool]:
    """What is being held, and whether a tick was interrupted before its cursor was saved (or the cursor was reset)."""
    episode = _parse(context.cursor)
    if episode is not None and episode.backpressure == "on":
        return episode, False
    remembered = _parse(controls.recall(context.instance, memory))
    return remembered, remembered is not None


def _parse(text: str | None) -> Episode | None:
    try:
        return msgspec.json.decode(text, type=Episode) if text else None
    except msgspec.DecodeError:
        return None


def _text(episode: Episode) -> str:
    return json.dumps(msgspec.to_builtins(episode))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _plan(context: dg.SensorEvaluationContext, holding: _Holding) -> Episode:
    """What there is to hold back, as things stand."""
    episode = Episode("on", _now(), {}, {}, [], [])
    for pool, limit in holding.pool_limits.items():
        now = controls.pool_setting(context.instance, pool)
        if now.limit is not None and now.limit <= limit:
            episode.notes.append(f"pool {pool}: its limit is {now.limit} already.")
        else:
            episode.pools[pool] = PoolHold(limit, now.limit, now.from_default)
    _plan_sensors(context, holding.pause_sensors, episode)
    return episode


def _plan_sensors(context: dg.SensorEvaluationContext, names: Iterable[str], episode: Episode) -> None:
    for name in names:
        state = controls.sensor_setting(context, name)
        if state is None:
            episode.notes.append(f"sensor {name}: there is none of that name in this code location.")
            context.log.warning(f"pause_sensors: there is no sensor {name!r} in this code location")
        elif not state.running:
            episode.notes.append(f"sensor {name}: it is stopped already.")
        elif not state.known:
            episode.later.append(name)
        else:
            episode.sensors[name] = SensorHold(state.status, state.started_at)


def _hold(context: dg.SensorEvaluationContext, episode: Episode) -> None:
    """Do what was planned. If that was interrupted before, only what is still as it was is changed."""
    for pool, held in episode.pools.items():
        if controls.pool_setting(context.instance, pool).limit == held.before:
            controls.set_pool_limit(context.instance, pool, held.set)
    _stop(context, episode.sensors)


def _stop_late(context: dg.SensorEvaluationContext, episode: Episode, memory: str) -> None:
    """Stop the sensors that could not be stopped before."""
    names, episode.later = episode.later, []
    already = set(episode.sensors)
    _plan_sensors(context, names, episode)
    controls.remember(context.instance, memory, _text(episode))
    _stop(context, {name: paused for name, paused in episode.sensors.items() if name not in already})


def _stop(context: dg.SensorEvaluationContext, sensors: Mapping[str, SensorHold]) -> None:
    for name, paused in sensors.items():
        state = controls.sensor_setting(context, name)
        if state is not None and (state.status, state.started_at) == (paused.before, paused.started_at):
            controls.stop_sensor(context, name)


def _let_go(context: dg.SensorEvaluationContext, episode: Episode) -> list[str]:
    """Undo what was done, and say what was left as it is because somebody changed it."""
    notes = [_let_go_of_pool(context, pool, held) for pool, held in episode.pools.items()]
    notes += [_let_go_of_sensor(context, name, paused) for name, paused in episode.sensors.items()]
    return [note for note in notes if note]


def _let_go_of_pool(context: dg.SensorEvaluationContext, pool: str, held: PoolHold) -> str:
    now = controls.pool_setting(context.instance, pool)
    if now.limit == held.set and not now.from_default:
        controls.restore_pool(context.instance, pool, controls.PoolSetting(held.before, held.before_was_default))
        return ""
    if now.limit == held.before:
        return ""
    return f"pool {pool}: left as it is, because somebody changed its limit from {held.set} to {now.limit}."


def _let_go_of_sensor(context: dg.SensorEvaluationContext, name: str, paused: SensorHold) -> str:
    now = controls.sensor_setting(context, name)
    if now is None:
        return f"sensor {name}: there is none of that name any more."
    if now.running:
        return ""  # somebody started it, or it was undone before
    if now.status != _STOPPED or now.started_at != paused.started_at:
        return f"sensor {name}: left as it is, because somebody started and stopped it."
    controls.restore_sensor(context, name, controls.SensorSetting(paused.before, True, paused.started_at))
    return ""


def _tell(
    context: dg.SensorEvaluationContext, queue: LeaseQueue, holding: _Holding, stats: QueueStats, *, on: bool
) -> None:
    if holding.on_change is not None:
        holding.on_change(context, BackpressureChange(on, queue.namespace, stats))


def _summary(episode: Episode) -> str:
    held = [f"pool {pool} is at {hold.set}." for pool, hold in episode.pools.items()]
    held += [f"sensor {name} is stopped." for name in episode.sensors]
    return " ".join(held + episode.notes)
