"""Batches for the hub, made by hand, and the wire without a sink in between."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import grpc

from lease_core.model import LeaseEvent, WorkItem
from lease_core.replication import encode_events
from lease_core.replication.hub import hub_pb2, hub_pb2_grpc

AT = datetime(2026, 11, 16, 8, 30, tzinfo=UTC)


def events(first: int, last: int, namespace: str = "n", salt: str = "") -> list[LeaseEvent]:
    return [
        LeaseEvent(namespace, number, "Enqueued", AT, sequence_id=number, item=WorkItem("f", f"{number}{salt}"))
        for number in range(first, last + 1)
    ]


def batch(
    first: int, last: int, /, source: str = "a", namespace: str = "n", salt: str = "", **more: Any
) -> hub_pb2.Batch:
    lines = encode_events(events(first, last, namespace, salt))
    return hub_pb2.Batch(**{
        "source": source, "namespace": namespace, "first": first, "last": last, "lines": lines, **more,
    })  # fmt: skip


def publish(address: str, batches: Iterable[hub_pb2.Batch]) -> list[tuple[str, int, str]]:
    """The outcome, the number that is waited for and the reason, for each batch of one stream."""
    with grpc.insecure_channel(address) as channel:
        answers = hub_pb2_grpc.HubStub(channel).Publish(iter(batches), timeout=60)
        return [(hub_pb2.Outcome.Name(each.outcome), each.next, each.reason) for each in answers]
