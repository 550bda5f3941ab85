"""One event of every type, as the first version writes them. The golden file has the same, byte for byte."""

from __future__ import annotations

from datetime import UTC, datetime

from lease_core.model import ErrorRecord, EventType, LeaseEvent, LeaseToken, WorkItem

AT = datetime(2026, 11, 16, 8, 30, 0, 123456, tzinfo=UTC)
LATER = datetime(2026, 11, 16, 8, 30, 30, tzinfo=UTC)
TOKEN = LeaseToken(7, 1, "0f8fad5b", 2)
NAME = WorkItem("file", 's3://raw/ä "b".json', "orders")
WHOLE = WorkItem(
    "file",
    's3://raw/ä "b".json',
    "orders",
    {"etag": "9f2c"},
    b"\x00\xff binary",
    "application/octet-stream",
    "request-1",
    5,
    LATER,
)


def _event(number: int, kind: str, **fields: object) -> LeaseEvent:
    return LeaseEvent("resourcelease", number, str(kind), AT, **fields)  # type: ignore[arg-type]


EVERY_TYPE = [
    _event(1, EventType.ENQUEUED, sequence_id=7, item=WHOLE, peer_id="loader", principal="svc-loader", pending=1,
           available_at=LATER, enqueued_at=AT),
    _event(2, EventType.LEASE_GRANTED, sequence_id=7, token=TOKEN, item=NAME, peer_id="worker-1", active=1,
           expires_at=LATER, attempt=1),
    _event(3, EventType.HEARTBEAT, sequence_id=7, token=TOKEN, peer_id="worker-1", active=1, expires_at=LATER),
    _event(4, EventType.FAILED, sequence_id=7, token=TOKEN, item=NAME, error="ValueError: no\n  stack", pending=1,
           requeued=True, available_at=LATER, attempt=1, peer_id="worker-1"),
    _event(5, EventType.EXPIRED, sequence_id=7, token=TOKEN, item=NAME, requeued=False, attempt=5),
    _event(6, EventType.RELEASED, sequence_id=7, token=TOKEN, item=NAME, pending=1, attempt=0),
    _event(7, EventType.COMPLETED, sequence_id=7, token=TOKEN, item=NAME, principal="svc-worker",
           result={"uri": "s3://out/a.parquet", "rows": [1, 2.5, None, True]}),
    _event(8, EventType.DEAD_LETTERED, sequence_id=7, item=NAME, error="ValueError: no"),
    _event(9, EventType.DRAINED, sequence_id=7, item=NAME),
    _event(10, EventType.RESTORED, sequence_id=7, item=WHOLE, requeued=True, enqueued_at=AT, available_at=AT, attempt=1,
           errors=(ErrorRecord(1, AT, "ValueError: no", "worker-1"),), metadata={"origin.namespace": "other"}),
    _event(11, EventType.PURGED, sequence_id=7, item=NAME),
    _event(12, EventType.BACKPRESSURE_CHANGED, pending=100, metadata={"active": "true", "shard.id": "eu-1"}),
]  # fmt: skip
