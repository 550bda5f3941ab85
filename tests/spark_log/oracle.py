"""The governance tables computed the plain way: one pass over ``queue.events()``, a dict for everything."""

from __future__ import annotations

import math
from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

from lease_core import LeaseEvent

ENDED = ("Completed", "Failed", "Expired", "Released")
COUNTED = {
    "attempts": "LeaseGranted",
    "heartbeats": "Heartbeat",
    "failures": "Failed",
    "expiries": "Expired",
    "releases": "Released",
    "restores": "Restored",
}
ACTIONS = {
    "Enqueued": "enqueued",
    "LeaseGranted": "leased",
    "Completed": "completed",
    "Failed": "failed",
    "Expired": "expired",
    "Released": "released",
    "DeadLettered": "dead_lettered",
    "Drained": "drained",
    "Restored": "restored",
    "Purged": "purged",
}


def _us(delta: timedelta) -> int:
    return max(0, delta // timedelta(microseconds=1))


def _hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


class Oracle:
    def __init__(self, events: list[LeaseEvent]) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.activity: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.waits: dict[datetime, list[int]] = defaultdict(list)
        self.works: dict[datetime, list[int]] = defaultdict(list)
        self.as_of = max(event.timestamp for event in events)
        for event in events:
            if event.sequence_id is not None:
                self._item(event)
            if event.item is not None:
                self._act(event)

    def _item(self, event: LeaseEvent) -> None:
        fresh = dict.fromkeys(("enqueued_at", "available_at", "first_leased_at", "last_leased_at", "expires_at"))
        fresh |= dict.fromkeys(("resource_type", "resource_id", "partition_key", "outcome", "finished_at"))
        fresh |= dict.fromkeys(("last_peer_id", "last_principal", "last_error"))
        zero = dict.fromkeys((*COUNTED, "queue_wait_us", "processing_us"), 0)
        item = self.items.setdefault(event.sequence_id or 0, {**fresh, **zero, "first_event": event.sequence_number})
        at = event.timestamp
        if event.type == "LeaseGranted":
            if item["available_at"] is not None:
                waited = _us(at - item["available_at"])
                item["queue_wait_us"] += waited
                self.waits[_hour(at)].append(waited)
            item["first_leased_at"] = item["first_leased_at"] or at
            item["last_leased_at"] = at
        if event.type in ENDED and item["last_leased_at"] is not None:
            end = min(at, item["expires_at"]) if event.type == "Expired" else at
            worked = _us(end - item["last_leased_at"])
            item["processing_us"] += worked
            self.works[_hour(at)].append(worked)
        item["expires_at"] = event.expires_at or item["expires_at"]
        if event.type == "Enqueued":
            item["available_at"], item["enqueued_at"] = event.available_at or at, at
        elif event.type in ("Failed", "Expired", "Released", "Restored") and event.requeued is not False:
            item["available_at"] = event.available_at or item["available_at"]
        if event.type == "Restored":
            item["enqueued_at"] = event.enqueued_at or item["enqueued_at"]
        for name, kind in COUNTED.items():
            item[name] += event.type == kind
        if event.item is not None:
            item["resource_type"], item["resource_id"] = event.item.resource_type, event.item.resource_id
            item["partition_key"] = event.item.partition_key or item["partition_key"]
        for name in ("peer_id", "principal", "error"):
            item[f"last_{name}"] = getattr(event, name) if getattr(event, name) is not None else item[f"last_{name}"]
        self._outcome(item, event)
        item["last_event"] = event.sequence_number

    def _outcome(self, item: dict[str, Any], event: LeaseEvent) -> None:
        known = {"Enqueued": "pending", "Released": "pending", "LeaseGranted": "leased", "Completed": "completed"}
        known |= {"DeadLettered": "dead", "Drained": "drained", "Purged": "purged"}
        outcome = known.get(event.type)
        if event.type in ("Failed", "Expired", "Restored"):
            outcome = "pending" if event.requeued else "dead"
        if outcome is not None:
            item["outcome"] = outcome
            item["finished_at"] = event.timestamp if outcome not in ("pending", "leased") else None

    def _act(self, event: LeaseEvent) -> None:
        assert event.item is not None
        who = (event.peer_id, event.principal, event.item.resource_type, event.item.resource_id)
        row = self.activity.setdefault(
            (_hour(event.timestamp), *who),
            {"first_at": event.timestamp, "last_at": event.timestamp, **dict.fromkeys(ACTIONS.values(), 0)},
        )
        row["first_at"] = min(row["first_at"], event.timestamp)
        row["last_at"] = max(row["last_at"], event.timestamp)
        row[ACTIONS[event.type]] += 1

    def latency(self) -> dict[datetime, dict[str, Any]]:
        hours = sorted({*self.waits, *self.works})
        return {
            hour: {
                f"{kind}_{name}": value
                for kind, values in (("wait", self.waits[hour]), ("processing", self.works[hour]))
                for name, value in {
                    "count": len(values),
                    "p50": percentile(values, 0.5),
                    "p90": percentile(values, 0.9),
                    "p99": percentile(values, 0.99),
                    "max": max(values, default=None),
                }.items()
            }
            for hour in hours
        }

    def anomalies(self, window: timedelta, least: int, bounces: int) -> dict[tuple[Any, ...], tuple[int, int]]:
        """What stands out, with how many leases and how many of them went wrong."""
        recent = {key: row for key, row in self.activity.items() if key[0] > self.as_of - window}
        found: dict[tuple[Any, ...], tuple[int, int]] = {}
        for what, kind in (("failed", "peer_failure_rate"), ("expired", "peer_expiry_rate")):
            per_peer: dict[str, list[int]] = defaultdict(lambda: [0, 0])
            for (_, peer, *_rest), row in recent.items():
                if peer is not None:
                    per_peer[peer][0] += row["completed"] + row["failed"] + row["expired"]
                    per_peer[peer][1] += row[what]
            for peer, (leases, times) in per_peer.items():
                others = [sum(counts) for counts in zip(*(v for p, v in per_peer.items() if p != peer), strict=True)]
                if leases < least or not others or not others[0]:
                    continue
                expected = (others[1] + 1) / (others[0] + 2)
                score = (times / leases - expected) / math.sqrt(expected * (1 - expected) / leases)
                if times / leases >= others[1] / others[0] + 0.1 and score >= 3:
                    found[kind, peer] = (leases, times)
        per_resource: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for (_, _peer, _principal, *resource), row in recent.items():
            bounced = row["failed"] + row["expired"] + row["released"]
            per_resource[resource[0], resource[1]][0] += row["completed"] + bounced
            per_resource[resource[0], resource[1]][1] += bounced
        for resource, (leases, times) in per_resource.items():
            if times >= bounces and times / leases >= 0.5:
                found["resource_bouncing", *resource] = (leases, times)
        return found


def percentile(values: list[int], share: float) -> float | None:
    """Interpolated between the two nearest."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below, above = math.floor(place), math.ceil(place)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
