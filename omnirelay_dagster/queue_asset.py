"""The queue as an asset in the UI: an external asset, and the sensor that observes it."""

from __future__ import annotations

import zlib
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

import dagster as dg
import msgspec

from lease_core import Lease, LeaseQueue
from omnirelay_dagster.checks import DEFAULT_MAX_LAG, evaluate
from omnirelay_dagster.look import QueueLook, look_at, queue_asset_key, shown
from omnirelay_dagster.requirements import RESOURCE
from omnirelay_dagster.sensors.declaring import check_queue, check_whole, queue_sensor

_MOST_ROWS = 50
_REPEAT_CHECKS_AFTER = 300.0
_LEASE_COLUMNS = dg.TableSchema(
    columns=[
        dg.TableColumn("owner", "string", description="who holds it"),
        dg.TableColumn("work", "string", description="what is held: the first item of the batch"),
        dg.TableColumn("items", "int", description="how many of the listed leases are of this batch"),
        dg.TableColumn("since", "string", description="when it was leased, UTC"),
        dg.TableColumn("attempt", "int", description="the highest attempt among the items"),
        dg.TableColumn("expires", "string", description="when it ends without a heartbeat, UTC"),
    ]
)


class _Observing(NamedTuple):
    key: dg.AssetKey
    max_lag: int


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the sensor remembers from one tick to the next; its cursor is this, as JSON that people can read."""

    at: datetime
    head: int
    completed: int
    checks: str = ""
    checks_at: datetime | None = None

    def to_cursor(self) -> str:
        return msgspec.json.encode(self).decode()


def from_cursor(cursor: str | None) -> Mark | None:
    """The mark in a cursor; None if there is none or somebody has edited it beyond recognition: then start afresh."""
    try:
        return msgspec.json.decode(cursor, type=Mark) if cursor else None
    except msgspec.MsgspecError:
        return None


def build_queue_asset(
    queue: str, *, asset_key: dg.AssetKey | None = None, group_name: str = "queues", description: str | None = None
) -> dg.AssetSpec:
    """The external asset that stands for the resource ``queue``: nothing materializes it, the sensor observes it."""
    return dg.AssetSpec(
        asset_key or queue_asset_key(queue),
        group_name=group_name,
        description=description
        or f"The lease queue `{queue}`: its depth, age, throughput and leases over time, and checks of its health.",
        kinds={"queue"},
        metadata={RESOURCE: queue},
    )


def build_observation_sensor(
    queue: str,
    *,
    asset_key: dg.AssetKey | None = None,
    max_lag: int = DEFAULT_MAX_LAG,
    minimum_interval_seconds: int = 30,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that shows how the resource ``queue`` is doing, in the UI, without a run.

    Each tick is one observation with the same numbers every time, so that each of them plots. The checks are reported
    along with it when what they say has changed, and every five minutes; so they are live, and quiet when all is well.
    """
    key = asset_key or queue_asset_key(check_queue(queue))
    check_whole("max_lag", max_lag, 0)

    return queue_sensor(
        queue,
        _tick,
        _Observing(key, max_lag),
        name=f"{queue}_observation_sensor",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=f"Shows depth, age, throughput, leases and health of the queue {queue!r}.",
    )


def _tick(context: dg.SensorEvaluationContext, queue: LeaseQueue, observing: _Observing) -> dg.SensorResult:
    look = look_at(queue, context.instance)
    before = from_cursor(context.cursor)
    verdicts = evaluate(look, observing.key, observing.max_lag)
    said = _fingerprint(verdicts)
    mark = Mark(look.at, look.stats.head, look.stats.completed, said, look.at)
    if before is not None and before.checks == said and _seconds(before.checks_at, look.at) < _REPEAT_CHECKS_AFTER:
        verdicts = []
        mark = msgspec.structs.replace(mark, checks_at=before.checks_at)
    return dg.SensorResult(asset_events=[observation(look, before, observing.key), *verdicts], cursor=mark.to_cursor())


def observation(look: QueueLook, before: Mark | None, key: dg.AssetKey) -> dg.AssetObservation:
    """One look as an observation: rounded numbers under keys that never change, and a table of what is held."""
    stats = look.stats
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "depth": stats.pending,
            "active": stats.active,
            "delayed": stats.delayed,
            "dead": stats.dead,
            "oldest_age_seconds": round(stats.oldest_pending_age or 0.0, 1),
            "throughput_per_minute": _throughput(look, before),
            "lag": _lag(look, before),
            "leases": dg.MetadataValue.table(records=_lease_table(look.leases), schema=_LEASE_COLUMNS),
        },
    )


def _throughput(look: QueueLook, before: Mark | None) -> float:
    """Completions a minute since the last tick; 0 at the first, and when the queue was replaced by a younger one."""
    if before is None:
        return 0.0
    elapsed = _seconds(before.at, look.at)
    done = look.stats.completed - before.completed
    return round(60 * done / elapsed, 1) if elapsed > 0 and done > 0 else 0.0


def _lag(look: QueueLook, before: Mark | None) -> int:
    """How far the slowest reader of the log is behind or, when nobody is registered, what came since the last tick."""
    if look.readers:
        return look.reader_lag
    return 0 if before is None else max(0, look.stats.head - before.head)


def _lease_table(leases: tuple[Lease, ...]) -> list[dg.TableRecord]:
    """A row for each batch, those that end soonest first."""
    by_batch = sorted(leases, key=lambda lease: (lease.owner_peer_id, lease.token.lease_id, lease.token.sequence_id))
    batches = [
        list(group) for _, group in groupby(by_batch, key=lambda lease: (lease.owner_peer_id, lease.token.lease_id))
    ]
    batches.sort(key=lambda batch: min(lease.expires_at for lease in batch))
    return [dg.TableRecord(_lease_row(batch)) for batch in batches[:_MOST_ROWS]]


def _lease_row(batch: list[Lease]) -> dict[str, str | float | bool | None]:
    item = batch[0].item
    return {
        "owner": shown(batch[0].owner_peer_id),
        "work": f"{shown(item.resource_type, 40)} {shown(item.resource_id)}",
        "items": len(batch),
        "since": _moment(min(lease.granted_at for lease in batch)),
        "attempt": max(lease.token.attempt for lease in batch),
        "expires": _moment(min(lease.expires_at for lease in batch)),
    }


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M:%S")


def _seconds(since: datetime | None, until: datetime) -> float:
    return float("inf") if since is None else (until - since).total_seconds()


def _fingerprint(verdicts: list[dg.AssetCheckEvaluation]) -> str:
    """Short, and different as soon as any check says something else."""
    said = "\n".join(f"{each.check_name} {each.passed} {each.description}" for each in verdicts)
    return f"{zlib.crc32(said.encode()):08x}"
