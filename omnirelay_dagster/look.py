"""One look at a queue: everything that its observations and its checks are made of, read once and then only judged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import NamedTuple

import dagster as dg

from lease_core import Lease, LeaseQueue, QueueStats
from omnirelay_dagster.manifest import READER

DAGSTER_PEER = "dagster/"
MOST_LEASES = 500
"""How many leases one look lists, those that end soonest first: what is in trouble comes before what is not."""

_FINISHED = (dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED)


class QueueLook(NamedTuple):
    """A queue at one moment of its own clock.

    ``readers`` says how far each registered reader of the log has come. ``ended_owners`` are owners of leases whose
    Dagster run is over: whatever still beats for them is a process that Dagster no longer knows of.
    """

    namespace: str
    at: datetime
    stats: QueueStats
    leases: tuple[Lease, ...]
    readers: Mapping[str, int]
    ended_owners: frozenset[str]

    @property
    def expired(self) -> tuple[Lease, ...]:
        """Leases that have run out and that nobody has taken over yet."""
        return tuple(lease for lease in self.leases if lease.expires_at <= self.at)

    @property
    def silent_owners(self) -> frozenset[str]:
        """Owners that let everything they hold run out."""
        heard = {lease.owner_peer_id for lease in self.leases if lease.expires_at > self.at}
        return frozenset(lease.owner_peer_id for lease in self.expired) - heard

    @property
    def reader_lag(self) -> int:
        """How many events the slowest reader of the log is behind; 0 if there is no reader."""
        return max((self.stats.head - cursor for cursor in self.readers.values()), default=0)


def look_at(queue: LeaseQueue, instance: dg.DagsterInstance) -> QueueLook:
    """Look without touching. Costs a few cheap queries however long the queue is."""
    # The time is read first: a lease that is renewed meanwhile must not look expired. It is the database's, since
    # that is the clock by which leases end.
    at = queue.now()
    # the manifest of published outputs keeps the whole log for itself; it reads nothing and is never behind
    readers = {name: cursor for name, cursor in queue.readers().items() if name != READER}
    leases = tuple(queue.leases(limit=MOST_LEASES, bodies=False))
    stats = queue.stats()
    owners = {lease.owner_peer_id for lease in leases}
    return QueueLook(queue.namespace, at, stats, leases, readers, _ended(owners, instance))


def _ended(owners: Collection[str], instance: dg.DagsterInstance) -> frozenset[str]:
    """The owners whose runs this instance knows to be over. Runs of other instances are not judged."""
    runs = sorted({run for owner in owners if (run := run_of(owner))})
    if not runs:
        return frozenset()
    ended = instance.get_runs(filters=dg.RunsFilter(run_ids=runs, statuses=list(_FINISHED)))
    over = {run.run_id for run in ended}
    return frozenset(owner for owner in owners if run_of(owner) in over)


def owner_of(run_id: str, step_key: str) -> str:
    """Who the leases belong to that a step of a run takes, so that a dead run's can be found and handed back."""
    return f"{DAGSTER_PEER}{run_id}/{step_key}"


def run_of(owner: str) -> str | None:
    """The id of the run that an owner is a step of, if it is one of Dagster's: ``dagster/<run id>/<step>``."""
    if not owner.startswith(DAGSTER_PEER):
        return None
    return owner.removeprefix(DAGSTER_PEER).partition("/")[0] or None


def queue_asset_key(queue: str) -> dg.AssetKey:
    """The key of the asset that stands for the queue in the UI: ``queues/<queue>``."""
    return dg.AssetKey(["queues", queue])


def shown(text: str, longest: int = 120) -> str:
    """Text from outside, fit to be shown: on one line, without control or markup characters, and not too long."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(_shown_character(character) for character in cut)


def _shown_character(character: str) -> str:
    if character.isprintable() and character not in "<>`\\":
        return character
    return "\\\\" if character == "\\" else f"\\u{ord(character):04x}"
