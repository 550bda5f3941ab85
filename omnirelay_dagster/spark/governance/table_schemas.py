"""The columns of the governance tables. Durations are whole microseconds, so that sums are exact."""

from __future__ import annotations

from pyspark.sql.types import DataType, DoubleType, LongType, StringType, StructField, StructType, TimestampType

_TEXT, _COUNT, _MOMENT, _RATE = StringType(), LongType(), TimestampType(), DoubleType()


def _struct(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


ITEM_HISTORY = _struct(
    namespace=_TEXT,
    sequence_id=_COUNT,
    resource_type=_TEXT,
    resource_id=_TEXT,
    partition_key=_TEXT,
    outcome=_TEXT,
    enqueued_at=_MOMENT,
    available_at=_MOMENT,
    first_leased_at=_MOMENT,
    last_leased_at=_MOMENT,
    expires_at=_MOMENT,
    finished_at=_MOMENT,
    queue_wait_us=_COUNT,
    processing_us=_COUNT,
    attempts=_COUNT,
    heartbeats=_COUNT,
    failures=_COUNT,
    expiries=_COUNT,
    releases=_COUNT,
    restores=_COUNT,
    last_peer_id=_TEXT,
    last_principal=_TEXT,
    last_error=_TEXT,
    first_event=_COUNT,
    last_event=_COUNT,
)
ACTIONS = {
    "enqueued": "Enqueued",
    "leased": "LeaseGranted",
    "completed": "Completed",
    "failed": "Failed",
    "expired": "Expired",
    "released": "Released",
    "dead_lettered": "DeadLettered",
    "drained": "Drained",
    "restored": "Restored",
    "purged": "Purged",
}
"""The columns that count what a peer did to a resource, and the events they count."""

PEER_ACTIVITY = _struct(
    namespace=_TEXT,
    hour=_MOMENT,
    peer_id=_TEXT,
    principal=_TEXT,
    resource_type=_TEXT,
    resource_id=_TEXT,
    first_at=_MOMENT,
    last_at=_MOMENT,
    **dict.fromkeys(ACTIONS, _COUNT),
)
LEASE_TIMINGS = _struct(namespace=_TEXT, hour=_MOMENT, sequence_number=_COUNT, wait_us=_COUNT, processing_us=_COUNT)
LEASE_LATENCY = _struct(
    namespace=_TEXT,
    hour=_MOMENT,
    granted=_COUNT,
    wait_p50_us=_RATE,
    wait_p90_us=_RATE,
    wait_p99_us=_RATE,
    wait_max_us=_COUNT,
    ended=_COUNT,
    processing_p50_us=_RATE,
    processing_p90_us=_RATE,
    processing_p99_us=_RATE,
    processing_max_us=_COUNT,
)
ANOMALIES = _struct(
    namespace=_TEXT,
    kind=_TEXT,
    peer_id=_TEXT,
    resource_type=_TEXT,
    resource_id=_TEXT,
    leases=_COUNT,
    times=_COUNT,
    rate=_RATE,
    baseline=_RATE,
    score=_RATE,
    first_at=_MOMENT,
    last_at=_MOMENT,
    as_of=_MOMENT,
)
SCHEMAS = {
    "item_history": ITEM_HISTORY,
    "peer_activity": PEER_ACTIVITY,
    "lease_timings": LEASE_TIMINGS,
    "lease_latency": LEASE_LATENCY,
    "anomalies": ANOMALIES,
}
