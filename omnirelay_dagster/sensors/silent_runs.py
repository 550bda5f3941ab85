"""Runs that died unseen: found by the leases they let expire.

When a machine dies with everything on it, nobody is left to report the run failed. It stays STARTED for ever and keeps
its pool slots. The queue knows better: leases that were not renewed are evidence. That a run merely is quiet is not:
a step may compute for hours without a word, but a leased step renews its leases meanwhile.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import dagster as dg
import msgspec
from dagster import DagsterRunStatus as Status
from dagster._core.execution.stats import StepEventStatus

from lease_core import LeaseEvent, LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.model import EventType
from omnirelay_dagster.sensors import instance_controls as controls
from omnirelay_dagster.sensors.declaring import queue_sensor
from omnirelay_dagster.sensors.liveness import end_expired, last_heard_of, owners, run_and_step

_SIGNS_OF_LIFE = (EventType.LEASE_GRANTED, EventType.HEARTBEAT, EventType.COMPLETED, EventType.FAILED)
_PAGE = 5_000
_MOST_EVENTS = 100_000
_MOST_SECONDS = 15.0
_MOST_SUSPECTS = 500


class Suspect(msgspec.Struct):
    """A run whose step let a lease expire, and has not been heard of in the queue since."""

    step: str
    since: datetime


class _Seen(msgspec.Struct):
    """The cursor: how far the log was read, and which runs are under suspicion."""

    read: int
    suspects: dict[str, Suspect] = {}


class _Watching(NamedTuple):
    report: bool
    grace: timedelta


def silent_run_sensor(
    queue: str,
    name: str,
    report_dead_runs: bool,
    grace_seconds: float,
    minimum_interval_seconds: int,
    default_status: dg.DefaultSensorStatus,
) -> dg.SensorDefinition:
    """The sensor that finds runs which died unseen; see ``build_run_status_sensors``."""
    watching = _Watching(report_dead_runs, timedelta(seconds=grace_seconds))

    return queue_sensor(
        queue,
        _tick,
        watching,
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Finds runs that died unseen, by the leases of the queue {queue!r} that they let expire.",
    )


def _tick(context: dg.SensorEvaluationContext, queue: LeaseQueue, watching: _Watching) -> dg.SensorResult:
    end_expired(queue)
    released = _hand_back_missed(context.instance, queue)
    if released:
        context.log.info(f"handed back {released} items that failed or cancelled runs held in {queue.namespace!r}")
    seen = _read(queue, _parse(context.cursor))
    dead = _judge(context.instance, seen, watching.grace, queue.now())
    for run, step in dead:
        why = (
            f"the step {step} let its lease in the queue {queue.namespace!r} expire, and nothing was heard of the run "
            f"for {watching.grace.total_seconds():g} seconds since"
        )
        if watching.report:
            controls.fail_run(context.instance, run, f"The run died unseen: {why}.")
            del seen.suspects[run.run_id]
        context.log.warning(f"run {run.run_id} {'is reported failed' if watching.report else 'seems dead'}: {why}")
    counted = "reported failed" if watching.report else "seem dead (report_dead_runs is off)"
    story = f"{released} items handed back, {len(dead)} runs {counted}, {len(seen.suspects)} under suspicion"
    return dg.SensorResult(skip_reason=story, cursor=json.dumps(msgspec.to_builtins(seen)))


def _hand_back_missed(instance: dg.DagsterInstance, queue: LeaseQueue) -> int:
    """Release what is held by runs that ended badly, however long ago."""
    holders, _ = owners(queue)
    by_run: dict[str, list[str]] = {}
    for owner in holders:
        if known := run_and_step(owner):
            by_run.setdefault(known[0], []).append(owner)
    if not by_run:
        return 0
    ended = instance.get_runs(dg.RunsFilter(run_ids=list(by_run), statuses=[Status.FAILURE, Status.CANCELED]))
    return sum(queue.release_owner(owner) for run in ended for owner in by_run[run.run_id])


def _parse(cursor: str | None) -> _Seen | None:
    try:
        return msgspec.json.decode(cursor, type=_Seen) if cursor else None
    except msgspec.DecodeError:
        return None


def _read(queue: LeaseQueue, seen: _Seen | None) -> _Seen:
    """Go through what is new in the log, or at first through the end of it."""
    head = queue.stats().head
    if seen is None or seen.read > head:
        seen = _Seen(max(0, head - _MOST_EVENTS), {})
    left, deadline = _MOST_EVENTS, time.monotonic() + _MOST_SECONDS
    while left > 0 and time.monotonic() < deadline:
        try:
            page = queue.events(seen.read, min(_PAGE, left))
        except EventsPruned as gap:
            seen.read = gap.oldest - 1
            continue
        if not page:
            break
        for event in page:
            _note(seen, event)
        seen.read = page[-1].sequence_number
        left -= len(page)
    return seen


def _note(seen: _Seen, event: LeaseEvent) -> None:
    known = run_and_step(event.peer_id)
    if known is None:
        return
    run_id, step = known
    if event.type in _SIGNS_OF_LIFE:
        seen.suspects.pop(run_id, None)
    elif event.type == EventType.EXPIRED and len(seen.suspects) < _MOST_SUSPECTS:
        seen.suspects[run_id] = Suspect(step, event.timestamp)


def _judge(
    instance: dg.DagsterInstance, seen: _Seen, grace: timedelta, queue_now: datetime
) -> list[tuple[dg.DagsterRun, str]]:
    """The suspects that are dead beyond doubt. Those that turn out to have ended in order are suspects no more.

    Leases expire by the queue's clock, runs are heard of by that of their machines: both must have been silent.
    """
    if not seen.suspects:
        return []
    runs = {
        run.run_id: run
        for run in instance.get_runs(dg.RunsFilter(run_ids=list(seen.suspects), statuses=[Status.STARTED]))
    }
    dead = []
    now = datetime.now(UTC)
    for run_id, suspect in list(seen.suspects.items()):
        run = runs.get(run_id)
        if run is None or _ended(instance, run_id, suspect.step):
            del seen.suspects[run_id]
        elif queue_now - suspect.since > grace:
            heard = last_heard_of(instance, run_id)
            if heard is None or now - heard > grace:
                dead.append((run, suspect.step))
    return dead


def _ended(instance: dg.DagsterInstance, run_id: str, step: str) -> bool:
    """Whether Dagster knows that the step ended, so that it is dealt with already."""
    stats = instance.get_run_step_stats(run_id, [step])
    return any(stat.status not in (None, StepEventStatus.IN_PROGRESS) for stat in stats)
