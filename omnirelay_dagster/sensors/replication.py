"""The replication sensor: the queue's log becomes asset materializations."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import dagster as dg

from lease_core import LeaseEvent, LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.model import EventType
from omnirelay_dagster.sensors.declaring import (
    check_choice,
    check_name,
    check_queue,
    check_seconds,
    check_whole,
    location_of,
    queue_sensor,
    wrong,
)
from omnirelay_dagster.sensors.dynamic_partitions import NOT_IN_KEYS, new_partitions

Granularity = Literal["namespace", "resource_type", "resource"]
GRANULARITIES = ("namespace", "resource_type", "resource")
ALL_BUT_HEARTBEATS = tuple(kind.value for kind in EventType if kind is not EventType.HEARTBEAT)

_PAGE = 5_000
_DATA_VERSION = "dagster/data_version"
_NOT_IN_ASSET_KEYS = re.compile(r"[^A-Za-z0-9_.-]")
_ESCAPED = re.compile(f"{NOT_IN_KEYS.pattern}|%")


class _Target(NamedTuple):
    """What a materialization is of."""

    key: dg.AssetKey
    partition: str | None = None


class _Replicating(NamedTuple):
    name: str
    target: Callable[[LeaseEvent], _Target | None]
    partitions: str | None
    event_types: tuple[str, ...]
    max_events: int
    max_assets: int
    max_seconds: float
    start: str
    keep_log: bool


class _Tally:
    """What happened to one asset or partition in one tick."""

    def __init__(self, first: LeaseEvent) -> None:
        self.first = first
        self.last = first
        self.counts: Counter[str] = Counter()

    def add(self, event: LeaseEvent) -> None:
        self.last = event
        self.counts[event.type] += 1


class _Reading:
    """The part of the log that one tick reads."""

    def __init__(self, after: int) -> None:
        self.upto = after
        self.missed = 0
        self.tallies: dict[_Target, _Tally] = {}


def build_replication_sensor(
    queue: str,
    *,
    granularity: Granularity = "resource_type",
    asset_key: Any = None,
    asset_key_prefix: Sequence[str] | str | None = None,
    partitions_def: dg.DynamicPartitionsDefinition | None = None,
    event_types: Iterable[str] | None = None,
    max_events_per_tick: int = 100_000,
    max_assets_per_tick: int = 500,
    max_seconds_per_tick: float = 20.0,
    start: Literal["beginning", "end"] = "beginning",
    keep_log: bool = True,
    name: str | None = None,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    description: str | None = None,
) -> dg.SensorDefinition:
    """A sensor that turns the log of the queue at the resource key ``queue`` into materializations without a run.

    ``granularity`` says of what: one asset for the ``"namespace"``, one for each ``"resource_type"``, or one with a
    dynamic partition for each ``"resource"``. The asset is ``asset_key`` (``[queue, "log"]`` by default) or begins with
    ``asset_key_prefix``. In one tick each asset or partition gets one materialization at most, however many events
    there were: with their counts, the first and last sequence number, and the last one as the data version.
    ``event_types`` are all but heartbeats; ``["Completed"]`` is what downstream automation usually wants.

    The cursor is the number of the last event read, and a tick that is repeated gives the same data versions. A tick
    is bounded by ``max_events_per_tick``, ``max_assets_per_tick`` (Dagster stores some 45 events a second) and
    ``max_seconds_per_tick``, so that a sensor far behind catches up in steps. The log is not pruned past what the
    sensor has read, unless ``keep_log=False``; if it was nevertheless, the sensor goes on at the oldest event and the
    metadata say how many were missed.
    """
    check_queue(queue)
    name = check_name(name, f"{queue}_replication_sensor")
    check_choice("granularity", granularity, GRANULARITIES)
    check_choice("start", start, ("beginning", "end"))
    replicating = _Replicating(
        name,
        _target(queue, granularity, asset_key, asset_key_prefix),
        _partitions(queue, granularity, partitions_def),
        _check_types(event_types),
        check_whole("max_events_per_tick", max_events_per_tick, 1),
        check_whole("max_assets_per_tick", max_assets_per_tick, 1),
        check_seconds("max_seconds_per_tick", max_seconds_per_tick),
        start,
        keep_log,
    )

    return queue_sensor(
        queue,
        _tick,
        replicating,
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description or f"Turns the log of the queue {queue!r} into materializations, by {granularity}.",
    )


# What is materialized


def _target(queue: str, granularity: str, asset_key: Any, prefix: Any) -> Callable[[LeaseEvent], _Target | None]:
    if asset_key is not None and prefix is not None:
        raise wrong("asset_key, asset_key_prefix", "give one of them, not both")
    if granularity == "resource_type":
        if asset_key is not None:
            raise wrong("asset_key", "with granularity='resource_type' there are many assets: give asset_key_prefix")
        path = _path("asset_key_prefix", prefix) if prefix is not None else [queue, "log"]
        of_type = lru_cache(1_000)(lambda name: _Target(dg.AssetKey([*path, _NOT_IN_ASSET_KEYS.sub("_", name)])))
        return lambda event: of_type(event.item.resource_type) if event.item else None
    if asset_key is not None:
        key = dg.AssetKey(_path("asset_key", asset_key))
    else:
        key = dg.AssetKey([*_path("asset_key_prefix", prefix), queue] if prefix is not None else [queue, "log"])
    if granularity == "namespace":
        whole = _Target(key)
        return lambda event: whole
    return lambda event: (
        _Target(key, partition_of(event.item.resource_type, event.item.resource_id)) if event.item else None
    )


def partition_of(resource_type: str, resource_id: str) -> str:
    """The dynamic partition of a resource: ``type/id``, with what Dagster does not take in a key as ``%XX``."""
    return _ESCAPED.sub(lambda found: f"%{ord(found.group()):02X}", f"{resource_type}/{resource_id}")


def _path(argument: str, key: Any) -> list[str]:
    if isinstance(key, dg.AssetKey):
        return list(key.path)
    path = [key] if isinstance(key, str) else list(key) if isinstance(key, list | tuple) else []
    if not path or not all(isinstance(part, str) and part for part in path):
        raise wrong(argument, f"must be an AssetKey, a str or a list of str (got {key!r})")
    return path


def _partitions(queue: str, granularity: str, definition: Any) -> str | None:
    """The name of the dynamic partitions to add to, if there are any."""
    if granularity != "resource":
        if definition is not None:
            raise wrong("partitions_def", "only means something with granularity='resource'")
        return None
    if definition is None:
        return f"{queue}_resources"
    if not isinstance(definition, dg.DynamicPartitionsDefinition) or definition.name is None:
        raise wrong("partitions_def", f"must be a DynamicPartitionsDefinition with a name (got {definition!r})")
    return definition.name


def _check_types(types: Any) -> tuple[str, ...]:
    if types is None:
        return ALL_BUT_HEARTBEATS
    listed = () if isinstance(types, str) else tuple(types)
    known = [kind.value for kind in EventType]
    if not listed or not all(kind in known for kind in listed):
        raise wrong("event_types", f"must be a list of some of {', '.join(known)} (got {types!r})")
    return tuple(str(kind) for kind in listed)


# One tick


def _tick(context: dg.SensorEvaluationContext, queue: LeaseQueue, replicating: _Replicating) -> dg.SensorResult:
    head = queue.stats().head
    after = _after(context, head, replicating)
    if replicating.keep_log:
        _claim_log(queue, f"dagster/{location_of(context) or ''}/{replicating.name}".replace("//", "/"), after)
    reading = _read(queue, after, replicating)
    if reading.missed:
        context.log.warning(f"{reading.missed} events after {after} were pruned before this sensor read them")
    lag = max(0, head - reading.upto)
    events = [
        _materialization(queue.namespace, target, tally, reading.missed, lag, replicating)
        for target, tally in reading.tallies.items()
    ]
    return dg.SensorResult(
        asset_events=events,
        dynamic_partitions_requests=new_partitions(
            replicating.partitions, (target.partition for target in reading.tallies), context.instance
        ),
        cursor=str(reading.upto),
        skip_reason=_story(after, reading, lag),
    )


def _after(context: dg.SensorEvaluationContext, head: int, replicating: _Replicating) -> int:
    """The number of the last event that was dealt with."""
    if not context.cursor:
        return head if replicating.start == "end" else 0
    if not context.cursor.isdecimal():
        raise dg.DagsterInvariantViolationError(
            f"the cursor must be the number of the last event read, not {context.cursor!r}: reset it in the UI"
        )
    after = int(context.cursor)
    if after <= head:
        return after
    context.log.warning(f"the log ends at {head}, before the cursor {after}: the queue was made anew, starting over")
    return 0


def _claim_log(queue: LeaseQueue, reader: str, after: int) -> None:
    """Have the log kept from ``after`` on: the saved cursor, so a tick that is lost can be repeated."""
    try:
        stands = queue.register_reader(reader, after)
    except EventsPruned as gap:
        stands = queue.register_reader(reader, gap.oldest - 1)
    if stands < after:
        queue.advance_reader(reader, after)


def _read(queue: LeaseQueue, after: int, replicating: _Replicating) -> _Reading:
    reading = _Reading(after)
    left = replicating.max_events
    deadline = time.monotonic() + replicating.max_seconds
    while left > 0 and time.monotonic() < deadline:
        try:
            page = queue.events(reading.upto, min(_PAGE, left))
        except EventsPruned as gap:
            reading.missed += gap.oldest - 1 - reading.upto
            reading.upto = gap.oldest - 1
            continue
        if not page or not _take(reading, page, replicating):
            break
        left -= len(page)
    return reading


def _take(reading: _Reading, page: list[LeaseEvent], replicating: _Replicating) -> bool:
    """Count the events of a page; false once one of them would need an asset too many."""
    for event in page:
        target = replicating.target(event) if event.type in replicating.event_types else None
        if target is not None:
            tally = reading.tallies.get(target)
            if tally is None:
                if len(reading.tallies) == replicating.max_assets:
                    return False
                tally = reading.tallies[target] = _Tally(event)
            tally.add(event)
        reading.upto = event.sequence_number
    return True


def _materialization(
    namespace: str, target: _Target, tally: _Tally, missed: int, lag: int, replicating: _Replicating
) -> dg.AssetMaterialization:
    """One materialization for all that happened, always with the same keys, so that they plot."""
    metadata: dict[str, Any] = {
        "omnirelay/queue": namespace,
        "omnirelay/events": tally.counts.total(),
        "omnirelay/first_sequence_number": tally.first.sequence_number,
        "omnirelay/last_sequence_number": tally.last.sequence_number,
        "omnirelay/last_event_at": dg.MetadataValue.timestamp(tally.last.timestamp),
        "omnirelay/pending": tally.last.pending,
        "omnirelay/active": tally.last.active,
        "omnirelay/missed_events": missed,
        "omnirelay/lag": lag,
    }
    metadata |= {f"omnirelay/events/{kind}": tally.counts[kind] for kind in replicating.event_types}
    return dg.AssetMaterialization(
        target.key,
        partition=target.partition,
        metadata=metadata,
        tags={_DATA_VERSION: str(tally.last.sequence_number)},
    )


def _story(after: int, reading: _Reading, lag: int) -> str:
    if reading.upto == after:
        return f"nothing new after event {after}"
    behind = f", {lag} behind" if lag else ""
    pruned = f", {reading.missed} of them pruned" if reading.missed else ""
    return f"events {after + 1} to {reading.upto}{pruned}: {len(reading.tallies)} materializations{behind}"
