"""Events to table rows, in Spark. Every result is a function of the events alone, however they are cut into updates.

To go on where the last update ended, a row that was stored joins in as if it were an event: it brings its totals, and
since when its item has been waiting or leased.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from lease_core.model import to_micros
from omnirelay_dagster.spark.governance.table_schemas import (
    ACTIONS,
    ANOMALIES,
    ITEM_HISTORY,
    LEASE_LATENCY,
    LEASE_TIMINGS,
    PEER_ACTIVITY,
)

EVENT_COLUMNS = (
    "namespace,sequence_number,type,timestamp,sequence_id,resource_type,resource_id,partition_key,peer_id,principal,"
    "error,expires_at,available_at,enqueued_at,requeued"
)
ITEMS_IN_A_PART = 250_000
_HOUR, _DAY = 3_600_000_000, 86_400_000_000
_ENDS = ("Completed", "Failed", "Expired", "Released")
_FINISHED = ("completed", "dead", "drained", "purged")


class Thresholds(NamedTuple):
    """What stands out. A peer: over ``window``, of at least ``min_leases`` it ended, its rate of failures or expiries
    is ``min_excess`` above that of all others and ``min_score`` standard errors away. A resource: of the leases on it
    that ended, at least ``min_bounces``, and half of them, did not end in a completion."""

    window: timedelta = timedelta(days=7)
    min_leases: int = 10
    min_excess: float = 0.1
    min_score: float = 3.0
    min_bounces: int = 3


def micros(moment: Column) -> Column:
    return F.unix_micros(moment)


def _down_to(number: Column, step: int) -> Column:
    """The multiple of ``step`` at or below a whole number, without a detour through floating point."""
    return number - F.pmod(number, F.lit(step))


def hour_of(moment: Column) -> Column:
    """The hour in which a moment falls, in UTC whatever the session's time zone."""
    return F.timestamp_micros(_down_to(micros(moment), _HOUR))


def day_of(moment: Column) -> Column:
    """The part of a table that a moment belongs to: its day in UTC, such as 2026-01-31."""
    return F.date_from_unix_date((_down_to(micros(moment), _DAY) / _DAY).cast("int")).cast("string")


def item_part(sequence_id: Column) -> Column:
    """The part of item_history that an item belongs to: neighbours are together."""
    return _down_to(sequence_id, ITEMS_IN_A_PART).cast("string")


def _is(*types: str) -> Column:
    return F.col("type").isin(*types)


def lifelines(events: DataFrame, stored: DataFrame) -> DataFrame:
    """The events of items, each with what came before it: how long its item had waited, or had been worked on.

    ``stored``: rows of item_history. They come along as rows without a type.
    """
    back = F.coalesce("requeued", F.lit(True))
    entered = F.when(_is("Enqueued"), F.col("timestamp")).when(_is("Restored"), F.col("enqueued_at"))
    free_from = F.when(_is("Enqueued"), F.coalesce("available_at", "timestamp")).when(
        _is("Failed", "Expired", "Released", "Restored") & back, F.col("available_at")
    )
    told = events.where("sequence_id IS NOT NULL").select(
        "*",
        entered.alias("entered_at"),
        free_from.alias("free_from"),
        F.when(_is("LeaseGranted"), F.col("timestamp")).alias("granted_at"),
        F.col("expires_at").alias("lease_until"),
        F.lit(None).cast(ITEM_HISTORY).alias("stored"),
    )
    carried = stored.select(
        F.col("namespace"),
        F.col("sequence_id"),
        F.col("last_event").alias("sequence_number"),
        F.col("available_at").alias("free_from"),
        F.col("last_leased_at").alias("granted_at"),
        F.col("expires_at").alias("lease_until"),
        F.struct(*ITEM_HISTORY.names).alias("stored"),
    )
    before = Window.partitionBy("sequence_id").orderBy("sequence_number").rowsBetween(Window.unboundedPreceding, -1)
    waited_since, held_since, held_until = (
        F.last(name, ignorenulls=True).over(before) for name in ("free_from", "granted_at", "lease_until")
    )
    ended_at = F.when(_is("Expired"), F.least("timestamp", held_until)).otherwise(F.col("timestamp"))
    return (
        told.unionByName(carried, allowMissingColumns=True)
        .withColumn("wait_us", F.when(_is("LeaseGranted"), _between(waited_since, F.col("timestamp"))))
        .withColumn("processing_us", F.when(_is(*_ENDS), _between(held_since, ended_at)))
    )


def _between(since: Column, until: Column) -> Column:
    """Microseconds from one to the other; none if the clock has stepped back, null if the beginning is not known."""
    return F.when(since.isNotNull(), F.greatest(micros(until) - micros(since), F.lit(0)))


def item_history(lines: DataFrame) -> DataFrame:
    """One row an item: what was stored of it, and the events since."""
    outcome = (
        F.when(_is("Enqueued", "Released"), "pending")
        .when(_is("LeaseGranted"), "leased")
        .when(_is("Completed"), "completed")
        .when(_is("Failed", "Expired", "Restored"), F.when(F.col("requeued"), "pending").otherwise("dead"))
        .when(_is("DeadLettered"), "dead")
        .when(_is("Drained"), "drained")
        .when(_is("Purged"), "purged")
    )
    lines = lines.withColumn("outcome", F.coalesce(outcome, F.col("stored.outcome"))).withColumn(
        "since", F.coalesce("timestamp", "stored.finished_at")
    )
    leased = F.when(_is("LeaseGranted"), F.col("timestamp"))
    rows = lines.groupBy("namespace", "sequence_id").agg(
        *(_latest(F.coalesce(name, f"stored.{name}")).alias(name) for name in _NAMES),
        _latest(F.col("outcome")).alias("outcome"),
        _latest(F.coalesce("entered_at", "stored.enqueued_at")).alias("enqueued_at"),
        _latest(F.col("free_from")).alias("available_at"),
        F.min(F.coalesce(leased, F.col("stored.first_leased_at"))).alias("first_leased_at"),
        _latest(F.col("granted_at")).alias("last_leased_at"),
        _latest(F.col("lease_until")).alias("expires_at"),
        F.max_by("since", F.when(F.col("outcome").isNotNull(), F.col("sequence_number"))).alias("finished_at"),
        _total("queue_wait_us", F.col("wait_us")),
        _total("processing_us", F.col("processing_us")),
        *(_total(name, _is(kind).cast("long")) for name, kind in _COUNTED.items()),
        _latest(F.coalesce(F.col("peer_id"), F.col("stored.last_peer_id"))).alias("last_peer_id"),
        _latest(F.coalesce(F.col("principal"), F.col("stored.last_principal"))).alias("last_principal"),
        _latest(F.coalesce(F.col("error"), F.col("stored.last_error"))).alias("last_error"),
        F.min(F.coalesce("stored.first_event", "sequence_number")).alias("first_event"),
        F.max("sequence_number").alias("last_event"),
    )
    finished = F.when(F.col("outcome").isin(*_FINISHED), F.col("finished_at"))
    return rows.withColumn("finished_at", finished).select(*ITEM_HISTORY.names)


_NAMES = ("resource_type", "resource_id", "partition_key")
_COUNTED = {
    "attempts": "LeaseGranted",
    "heartbeats": "Heartbeat",
    "failures": "Failed",
    "expiries": "Expired",
    "releases": "Released",
    "restores": "Restored",
}


def _latest(value: Column) -> Column:
    return F.max_by(value, F.when(value.isNotNull(), F.col("sequence_number")))


def _total(name: str, value: Column) -> Column:
    return F.sum(F.coalesce(value, F.col(f"stored.{name}"), F.lit(0))).alias(name)


def lease_timings(lines: DataFrame) -> DataFrame:
    """One row for each lease that was granted or ended, with how long that took."""
    timed = lines.where("wait_us IS NOT NULL OR processing_us IS NOT NULL")
    return timed.withColumn("hour", hour_of(F.col("timestamp"))).select(*LEASE_TIMINGS.names)


def lease_latency(timings: DataFrame) -> DataFrame:
    """Percentiles by hour, exact: interpolated between the two nearest."""
    columns = []
    for kind, count in (("wait", "granted"), ("processing", "ended")):
        taken = F.col(f"{kind}_us")
        columns.append(F.count(taken).alias(count))
        columns += [F.percentile(taken, share / 100).alias(f"{kind}_p{share}_us") for share in (50, 90, 99)]
        columns.append(F.max(taken).alias(f"{kind}_max_us"))
    return timings.groupBy("namespace", "hour").agg(*columns).select(*LEASE_LATENCY.names)


def peer_activity(events: DataFrame, stored: DataFrame) -> DataFrame:
    """Who did what to which resource, by hour. Heartbeats name no resource and are not counted here."""
    keys = ["namespace", "hour", "peer_id", "principal", "resource_type", "resource_id"]
    fresh = events.where("resource_type IS NOT NULL").select(
        F.col("namespace"),
        hour_of(F.col("timestamp")).alias("hour"),
        *keys[2:],
        F.col("timestamp").alias("first_at"),
        F.col("timestamp").alias("last_at"),
        *(_is(kind).cast("long").alias(name) for name, kind in ACTIONS.items()),
    )
    return (
        fresh.unionByName(stored)
        .groupBy(*keys)
        .agg(
            F.min("first_at").alias("first_at"),
            F.max("last_at").alias("last_at"),
            *(F.sum(name).alias(name) for name in ACTIONS),
        )
        .select(*PEER_ACTIVITY.names)
    )


def anomalies(activity: DataFrame, as_of: datetime, limits: Thresholds) -> DataFrame:
    """What stands out in the activity of the window that ends at ``as_of``, a time taken from the log itself."""
    recent = activity.where(F.col("hour") > _moment(as_of - limits.window))
    peers = _peers(recent, limits, "failed", "peer_failure_rate").unionByName(
        _peers(recent, limits, "expired", "peer_expiry_rate")
    )
    found = peers.unionByName(_bouncing(recent, limits), allowMissingColumns=True)
    for name in set(ANOMALIES.names) - set(found.columns):
        found = found.withColumn(name, F.lit(None).cast(ANOMALIES[name].dataType))
    return found.withColumn("as_of", _moment(as_of)).select(
        *(F.col(field.name).cast(field.dataType) for field in ANOMALIES)
    )


def _moment(at: datetime) -> Column:
    return F.timestamp_micros(F.lit(to_micros(at)))


def _peers(recent: DataFrame, limits: Thresholds, what: str, kind: str) -> DataFrame:
    """Peers whose rate of ``what`` is well above that of all other peers together."""
    ended = recent.where("peer_id IS NOT NULL AND completed + failed + expired > 0")
    each = ended.groupBy("namespace", "peer_id").agg(
        F.sum(F.expr("completed + failed + expired")).alias("leases"),
        F.sum(what).alias("times"),
        F.min("first_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
    )
    everybody = Window.partitionBy("namespace")
    other_leases = F.sum("leases").over(everybody) - F.col("leases")
    other_times = F.sum("times").over(everybody) - F.col("times")
    rated = (
        each.withColumn("rate", F.col("times") / F.col("leases"))
        .withColumn("baseline", F.when(other_leases > 0, other_times / other_leases))
        .withColumn("_expected", (other_times + 1) / (other_leases + 2))
        .withColumn(
            "score",
            (F.col("rate") - F.col("_expected"))
            / F.sqrt(F.col("_expected") * (1 - F.col("_expected")) / F.col("leases")),
        )
    )
    return rated.where(
        (F.col("leases") >= limits.min_leases)
        & (F.col("rate") >= F.col("baseline") + limits.min_excess)
        & (F.col("score") >= limits.min_score)
    ).select("namespace", F.lit(kind).alias("kind"), "peer_id", *_RATED)


_RATED = ("leases", "times", "rate", "baseline", "score", "first_at", "last_at")


def _bouncing(recent: DataFrame, limits: Thresholds) -> DataFrame:
    """Resources whose leases mostly end without a completion."""
    each = recent.groupBy("namespace", "resource_type", "resource_id").agg(
        F.sum(F.expr("completed + failed + expired + released")).alias("leases"),
        F.sum(F.expr("failed + expired + released")).alias("times"),
        F.min("first_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
    )
    return (
        each.where((F.col("times") >= limits.min_bounces) & (F.col("times") * 2 >= F.col("leases")))
        .withColumn("rate", F.col("times") / F.col("leases"))
        .withColumn("kind", F.lit("resource_bouncing"))
    )
