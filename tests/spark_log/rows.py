"""Rows of the source, back as the events they came from."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from lease_core import LeaseEvent, LeaseQueue, LeaseToken, WorkItem
from lease_core.model import ErrorRecord


def to_event(row: dict[str, Any]) -> LeaseEvent:
    token = item = None
    if row["token_lease_id"] is not None:
        token = LeaseToken(row["sequence_id"], row["token_attempt"], row["token_lease_id"], row["token_fence"])
    if row["resource_type"] is not None:
        item = WorkItem(
            row["resource_type"],
            row["resource_id"],
            row["partition_key"],
            dict(row["attributes"] or {}),
            bytes(row["body"] or b""),
            row["payload_encoding"],
            row["request_id"],
            row["priority"] or 0,
            _utc(row["not_before"]),
        )
    return LeaseEvent(
        namespace=row["namespace"],
        sequence_number=row["sequence_number"],
        type=row["type"],
        timestamp=_utc(row["timestamp"]),  # type: ignore[arg-type]
        sequence_id=row["sequence_id"],
        token=token,
        item=item,
        error=row["error"],
        peer_id=row["peer_id"],
        principal=row["principal"],
        result=None if row["result"] is None else msgspec.json.decode(row["result"]),
        pending=row["pending"],
        active=row["active"],
        expires_at=_utc(row["expires_at"]),
        available_at=_utc(row["available_at"]),
        enqueued_at=_utc(row["enqueued_at"]),
        requeued=row["requeued"],
        attempt=row["attempt"],
        errors=tuple(ErrorRecord(e["attempt"], _utc(e["at"]), e["error"], e["peer_id"]) for e in row["errors"]),  # type: ignore[arg-type]
        metadata=dict(row["metadata"]),
        schema_version=row["schema_version"],
    )


def _utc(moment: datetime | None) -> datetime | None:
    """Spark hands out local times without a zone, Arrow aware ones."""
    return None if moment is None else moment.astimezone(UTC)


def events_of(queue: LeaseQueue) -> list[LeaseEvent]:
    events: list[LeaseEvent] = []
    while page := queue.events(after=events[-1].sequence_number if events else 0):
        events += page
    return events
