"""The work sensor: launches runs while there is work for them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import dagster as dg
from dagster import DagsterRunStatus as Status

from lease_core import LeaseQueue, QueueStats
from omnirelay_dagster.sensors.declaring import (
    check_name,
    check_queue,
    check_seconds,
    check_whole,
    location_of,
    queue_sensor,
    wrong,
)
from omnirelay_dagster.sensors.dynamic_partitions import new_partitions
from omnirelay_dagster.sensors.liveness import end_expired, last_heard_of, owners, run_and_step
from omnirelay_dagster.sensors.work_partitions import (
    Given,
    checked_partitions,
    dynamic_name,
    partitions_of_target,
    resolved,
    sort_out,
)

SENSOR_TAG = "omnirelay/work_sensor"
LOCATION_TAG = "omnirelay/code_location"

_WAITING = (Status.QUEUED, Status.NOT_STARTED, Status.STARTING)
_WORKING = (Status.STARTED, Status.CANCELING)
_NEVER_SUBMITTED = timedelta(minutes=10)
_MOST_RUNS = 1_000
_PARTITION = "dagster/partition"
_LOOK_AHEAD = 10_000
_MOST_SHOWN = 10


class _Launching(NamedTuple):
    name: str
    max_concurrent_runs: int
    items_per_run: int
    ignore_silent_runs_after: timedelta
    run_config: Any
    tags: Mapping[str, str]
    partition_key: Given | None
    partitions_def: dg.PartitionsDefinition[str] | None


class _Runs(NamedTuple):
    """The unfinished runs of one sensor: not begun yet (by partition), at work, and begun but not heard of for long."""

    waiting: Counter[str | None]
    working: int
    silent: tuple[str, ...] = ()

    @property
    def about_to_begin(self) -> int:
        return self.waiting.total()


def build_work_sensor(
    queue: str,
    *,
    target: Any = None,
    job: Any = None,
    asset_selection: Any = None,
    max_concurrent_runs: int = 1,
    items_per_run: int = 100,
    ignore_silent_runs_after: float = 600.0,
    run_config: dg.RunConfig | Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    partition_key: Given | None = None,
    partitions_def: dg.PartitionsDefinition[str] | None = None,
    name: str | None = None,
    minimum_interval_seconds: int = 10,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    description: str | None = None,
) -> dg.SensorDefinition:
    """A sensor that launches runs while the queue at the resource key ``queue`` has items that can be leased now.

    What to run is one of ``target`` (an asset, a selection or a job), ``job`` or ``asset_selection``. There are never
    more than ``max_concurrent_runs`` unfinished runs of this sensor, and no more than there is work for, at about
    ``items_per_run`` items each: the asset's ``batch_size``, or far more if it drains.

    Run requests carry no run key. Dagster remembers run keys for ever, and work that comes back under a key seen
    before would be dropped without a word; here a run too many finds the queue empty and ends. A run that began, but
    holds no lease and wrote nothing for ``ignore_silent_runs_after`` seconds, is taken for dead and not counted, so
    that a killed machine cannot stop the queue.

    For an asset with partitions, ``partition_key`` is the partition that every run is for, or a function of the
    context that gives it. With ``partitions_def``, which an asset declared ``by_partition=True`` brings along, each run
    is for a partition that has items waiting, and takes those: an item's ``partition_key`` is its partition. Dynamic
    partitions are added as items come; items under a key that is no partition are left alone, and named in the log.
    """
    check_queue(queue)
    name = check_name(name, f"{queue}_work_sensor")
    launching = _Launching(
        name,
        check_whole("max_concurrent_runs", max_concurrent_runs, 1),
        check_whole("items_per_run", items_per_run, 1),
        timedelta(seconds=check_seconds("ignore_silent_runs_after", ignore_silent_runs_after)),
        run_config,
        _check_tags(tags),
        partition_key,
        checked_partitions(target, partition_key, partitions_def),
    )
    return queue_sensor(
        queue,
        _tick,
        launching,
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description or f"Launches runs while the queue {queue!r} has work.",
        **_what_to_run(target, job, asset_selection),
    )


def _what_to_run(target: Any, job: Any, asset_selection: Any) -> dict[str, Any]:
    given = {"target": target, "job": job, "asset_selection": asset_selection}
    given = {argument: value for argument, value in given.items() if value is not None}
    if len(given) != 1:
        raise wrong(
            "target, job, asset_selection",
            f"give exactly one of them, to say what to run (got {', '.join(given) or 'none'})",
        )
    return given


def _check_tags(tags: Any) -> dict[str, str]:
    if tags is None:
        return {}
    if not isinstance(tags, Mapping) or not all(isinstance(text, str) for pair in tags.items() for text in pair):
        raise wrong("tags", f"must be a mapping of str to str (got {tags!r})")
    if taken := {SENSOR_TAG, LOCATION_TAG} & set(tags):
        raise wrong("tags", f"{', '.join(sorted(taken))} is what the sensor knows its own runs by; leave it out")
    return dict(tags)


def _tick(context: dg.SensorEvaluationContext, queue: LeaseQueue, launching: _Launching) -> dg.SensorResult:
    end_expired(queue)
    stats = queue.stats()
    own_tags = {SENSOR_TAG: launching.name}
    if (location := location_of(context)) is not None:
        own_tags[LOCATION_TAG] = location
    runs = _unfinished(context.instance, own_tags, queue, launching)
    if runs.silent:
        context.log.warning(
            f"not counting {len(runs.silent)} runs that began and fell silent: {', '.join(runs.silent)}. "
            "build_run_status_sensors(report_dead_runs=True) reports such runs failed"
        )
    if launching.partition_key is None and launching.partitions_def is None:
        launching = launching._replace(partitions_def=partitions_of_target(context, launching.name))
    items = _items(context, queue, stats, launching)
    wanted, why_not = _which(items, runs, stats, launching)
    return dg.SensorResult(
        run_requests=[
            dg.RunRequest(run_config=launching.run_config, tags={**launching.tags, **own_tags}, partition_key=partition)
            for partition in wanted
        ],
        skip_reason=None if wanted else why_not,
        cursor=_cursor(stats, items, runs, len(wanted)),
        dynamic_partitions_requests=new_partitions(dynamic_name(launching.partitions_def), wanted, context.instance),
    )


def _items(
    context: dg.SensorEvaluationContext, queue: LeaseQueue, stats: QueueStats, launching: _Launching
) -> dict[str | None, int]:
    """How many items a run of which partition could lease now, the first in line first."""
    if launching.partitions_def is None:
        available = _available(stats)
        return {resolved(launching.partition_key, context): available} if available > 0 else {}
    found = sort_out(queue.waiting(_LOOK_AHEAD), launching.partitions_def, context.instance)
    if found.unknown:
        some = ", ".join(repr(key) for key in list(found.unknown)[:_MOST_SHOWN])
        context.log.warning(
            f"{sum(found.unknown.values())} items wait under a partition_key that is no partition of the target, and "
            f"nothing is launched for them: {some}"
        )
    return dict(found.known.items())


def _available(stats: QueueStats) -> int:
    """Items that a run could lease now; those kept back by an exclusive key are pending, but not among them."""
    return 0 if stats.oldest_pending_age is None else stats.pending - stats.delayed


def _which(
    items: Mapping[str | None, int], runs: _Runs, stats: QueueStats, launching: _Launching
) -> tuple[list[str | None], str]:
    """The partition of each run to launch (none, where there are no partitions) and, if there is no run, why."""
    available = sum(items.values())
    if available <= 0:
        return [], (
            f"no work: {stats.pending} pending, of which {stats.delayed} delayed and none can be leased now; "
            f"{stats.active} leased"
        )
    room = launching.max_concurrent_runs - runs.about_to_begin - runs.working
    if room <= 0:
        return [], (
            f"{available} items wait, but {runs.working} runs are at work and {runs.about_to_begin} are about to be "
            f"(max_concurrent_runs={launching.max_concurrent_runs})"
        )
    turns = [
        (turn, place, partition)
        for place, (partition, count) in enumerate(items.items())
        for turn in range(-(-count // launching.items_per_run) - _begin_soon(runs, partition, launching))
    ]
    if not turns:
        return [], f"{available} items wait, and {runs.about_to_begin} runs that are about to begin will take them"
    # one for each partition before there is a second for any
    return [partition for _, _, partition in sorted(turns, key=lambda each: each[:2])[:room]], ""


def _begin_soon(runs: _Runs, partition: str | None, launching: _Launching) -> int:
    """Runs that will take items of the partition: any of them, where runs take what is next in line."""
    return runs.about_to_begin if launching.partitions_def is None else runs.waiting[partition]


def _unfinished(
    instance: dg.DagsterInstance, tags: Mapping[str, str], queue: LeaseQueue, launching: _Launching
) -> _Runs:
    records = instance.get_run_records(
        dg.RunsFilter(tags=dict(tags), statuses=[*_WAITING, *_WORKING]), limit=_MOST_RUNS
    )
    now = datetime.now(UTC)
    waiting = Counter(
        record.dagster_run.tags.get(_PARTITION)
        for record in records
        if record.dagster_run.status in _WAITING
        # made, but never submitted: a launch that was interrupted, and that nobody will take up again
        and not (record.dagster_run.status == Status.NOT_STARTED and _age(record, now) > _NEVER_SUBMITTED)
    )
    working = [record for record in records if record.dagster_run.status in _WORKING]
    if waiting.total() + len(working) < launching.max_concurrent_runs:
        return _Runs(waiting, len(working))
    silent = _silent(instance, working, queue, now, launching.ignore_silent_runs_after)
    return _Runs(waiting, len(working) - len(silent), silent)


def _silent(
    instance: dg.DagsterInstance,
    working: Sequence[dg.RunRecord],
    queue: LeaseQueue,
    now: datetime,
    patience: timedelta,
) -> tuple[str, ...]:
    """Runs that hold no lease and have not been heard of for longer than ``patience``."""
    suspects = []
    for record in working:
        if _age(record, now) > patience:
            heard = last_heard_of(instance, record.dagster_run.run_id)
            if heard is None or now - heard > patience:
                suspects.append(record.dagster_run.run_id)
    if not suspects:
        return ()
    holders, all_of_them = owners(queue)
    if not all_of_them:
        return ()  # any of the runs may hold a lease that was not looked at
    holding = {known[0] for owner in holders if (known := run_and_step(owner))}
    return tuple(run_id for run_id in suspects if run_id not in holding)


def _age(record: dg.RunRecord, now: datetime) -> timedelta:
    created = record.create_timestamp
    return now - (created if created.tzinfo else created.replace(tzinfo=UTC))


def _cursor(stats: QueueStats, items: Mapping[str | None, int], runs: _Runs, launched: int) -> str:
    """Nothing is read from it: it is there to be looked at, as the tick's page shows it."""
    seen: dict[str, Any] = {"pending": stats.pending, "delayed": stats.delayed, "leased": stats.active}
    if partitions := {key: count for key, count in list(items.items())[:_MOST_SHOWN] if key is not None}:
        seen["partitions"] = partitions
    seen |= {"runs_waiting": runs.about_to_begin, "runs_working": runs.working, "runs_silent": len(runs.silent)}
    return json.dumps(seen | {"runs_launched": launched})
