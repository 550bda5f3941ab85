"""Who is still alive: how leases are tied to runs, and when a run was last heard of."""

from __future__ import annotations

from datetime import UTC, datetime

import dagster as dg

from lease_core import LeaseQueue

_SOONEST = 1_000


def run_and_step(owner: str | None) -> tuple[str, str] | None:
    """The run and step that a lease's owner stands for, or None if it is no step of a Dagster run."""
    parts = (owner or "").split("/", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "dagster" else None


def end_expired(queue: LeaseQueue) -> None:
    """Make leases that have run out visible as work again.

    Leasing would do that by itself, but a sensor decides whether anybody is going to lease.
    """
    soonest = queue.leases(1, bodies=False)
    if soonest and soonest[0].expires_at <= queue.now():
        queue.sweep()


def owners(queue: LeaseQueue) -> tuple[set[str], bool]:
    """Who holds leases, and whether those are all: a dead run's leases are not renewed, so they end soonest."""
    now = queue.now()  # read first: a lease that is renewed meanwhile must not look expired
    leases = queue.leases(_SOONEST, bodies=False)
    return {lease.owner_peer_id for lease in leases if lease.expires_at > now}, len(leases) < _SOONEST


def last_heard_of(instance: dg.DagsterInstance, run_id: str) -> datetime | None:
    """When the run last wrote anything to Dagster's event log."""
    records = instance.get_records_for_run(run_id, limit=1, ascending=False).records
    return datetime.fromtimestamp(records[0].event_log_entry.timestamp, UTC) if records else None
