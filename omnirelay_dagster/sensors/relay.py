"""The relay sensor: the queue's log is delivered to sinks, a little with every tick."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg

from lease_core import LeaseQueue
from lease_core.replication import RefusedEvents, Relay, Rules, Sink, SinkStatus, SinkUnavailable
from lease_core.replication.settings import load_settings
from omnirelay_dagster.sensors.declaring import check_name, check_queue, check_seconds, queue_sensor, wrong

Sinks = Sink | Iterable[Sink]
_MANY = 1_000_000_000


class _Relaying(NamedTuple):
    sinks: Callable[[], Sinks] | None
    config: Path | None
    rules: Rules | Mapping[str, Rules] | None
    refused: str | os.PathLike[str] | None
    max_seconds: float


def build_relay_sensor(
    queue: str,
    *,
    sinks: Callable[[], Sinks] | None = None,
    config: str | os.PathLike[str] | None = None,
    rules: Rules | Mapping[str, Rules] | None = None,
    refused: str | os.PathLike[str] | None = None,
    max_seconds_per_tick: float = 20.0,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    description: str | None = None,
) -> dg.SensorDefinition:
    """A sensor that delivers the log of the queue at the resource key ``queue`` to sinks, as a ``Relay`` does.

    The sinks are what the function ``sinks`` makes in every tick, served by ``rules`` and ``refused`` as in ``Relay``;
    or those of the TOML file ``config``, which is read in every tick and may be the one that ``omnirelay relay`` reads
    (the queue is this resource's, whatever ``[relay]`` says of it).

    A tick delivers what there is, for ``max_seconds_per_tick`` at most, and goes on at the next. The cursor says where
    each sink stands, for people to read: where to go on is kept with the sink or as a reader of the queue, as it is by
    a relay of any other kind, so a process and a sensor may take turns. A sink that cannot deliver fails the tick, in
    words that say which and why, after all others were served; it is tried again in the next one.
    """
    check_queue(queue)
    if (sinks is None) == (config is None):
        raise wrong(
            "sinks, config", "give one of them: a function that makes the sinks, or a TOML file that names them"
        )
    if sinks is not None and not callable(sinks):
        raise wrong("sinks", f"must be a function that makes the sinks, so that each tick has its own (got {sinks!r})")
    if config is not None:
        if rules is not None or refused is not None:
            raise wrong("rules, refused", "are in the file already; give them with sinks= only")
        if not Path(config).is_file():
            raise wrong("config", f"there is no file {os.fspath(config)}")
    relaying = _Relaying(
        sinks,
        None if config is None else Path(config),
        rules,
        refused,
        check_seconds("max_seconds_per_tick", max_seconds_per_tick),
    )
    return queue_sensor(
        queue,
        _tick,
        relaying,
        name=check_name(name, f"{queue}_relay_sensor"),
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description or f"Delivers the log of the queue {queue!r} to sinks.",
    )


def _tick(context: dg.SensorEvaluationContext, queue: LeaseQueue, relaying: _Relaying) -> dg.SensorResult:
    relay = _relay(queue, relaying)
    deadline = time.monotonic() + relaying.max_seconds
    try:
        found = relay.run_once(_MANY, max_seconds=relaying.max_seconds)
    finally:
        relay.stop(max(1.0, deadline - time.monotonic()))
    story = "; ".join(map(_told, found))
    context.log.info(story)
    if any(each.state in ("retrying", "stopped") for each in found):
        raise SinkUnavailable(story)
    return dg.SensorResult(cursor=json.dumps({each.name: _place(each) for each in found}), skip_reason=story)


def _relay(queue: LeaseQueue, relaying: _Relaying) -> Relay:
    if relaying.sinks is not None:
        refused = None if relaying.refused is None else RefusedEvents(relaying.refused)
        return Relay(queue, relaying.sinks(), rules=relaying.rules, refused=refused)
    settings = load_settings(relaying.config, source="the resource")
    refused = None if settings.relay.refused is None else RefusedEvents(settings.relay.refused)
    return Relay(queue, settings.make_sinks(), rules=settings.rules(), refused=refused)


def _place(status: SinkStatus) -> dict[str, Any]:
    return {"position": status.position, "behind": status.behind, "delivered": status.delivered}


def _told(status: SinkStatus) -> str:
    if status.state == "new":
        return f"sink {status.name} waits for the first event"
    behind = "" if status.behind is None else f", {status.behind} behind"
    if status.error is None:
        return f"sink {status.name} is at event {status.position}{behind}, {status.delivered} delivered"
    outlook = (
        "it is tried again in the next tick" if status.state == "retrying" else "it stays there until that is put right"
    )
    return f"sink {status.name} cannot go on at event {status.position}{behind}: {status.error} ({outlook})"
