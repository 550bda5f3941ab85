"""How far the log is in the table: written into the snapshot that holds the data, so that neither is without the other.

Every snapshot of ours carries the marks of all queues that feed the table. A snapshot by somebody else (a compaction,
a delete) carries none, so the mark is looked for along its ancestors. After a rollback the ancestors are those of the
older state, its mark holds again, and what came after is committed anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned
from omnirelay_dagster.iceberg.errors import LogMismatch, WatermarkLost

if TYPE_CHECKING:
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import Snapshot

PREFIX = "omnirelay."


class Mark(NamedTuple):
    """Up to number ``sequence`` of the log everything is in the table; the last batch was ``batch``, by ``lease``."""

    sequence: int
    asset: str
    queue: str
    batch: int
    lease: str

    def properties(self, namespace: str) -> dict[str, str]:
        return {f"{PREFIX}{namespace}.{name}": str(value) for name, value in self._asdict().items()}


def since_key(namespace: str) -> str:
    """The table property that holds the table's own sequence number of the first snapshot with a mark of the queue."""
    return f"{PREFIX}{namespace}.since"


def key_of(namespace: str) -> str:
    """The snapshot property that holds the watermark of a queue."""
    return f"{PREFIX}{namespace}.sequence"


def ancestors(metadata: TableMetadata) -> Iterator[Snapshot]:
    """The current snapshot and those it came from, as far back as they are kept."""
    snapshot = metadata.current_snapshot()
    while snapshot is not None:
        yield snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot_by_id(parent)


def marks_in(snapshot: Snapshot) -> dict[str, str]:
    """All marks of a snapshot, of whichever queue."""
    kept = {} if snapshot.summary is None else snapshot.summary.additional_properties
    return {name: value for name, value in kept.items() if name.startswith(PREFIX)}


def mark_of(snapshot: Snapshot, namespace: str) -> Mark | None:
    kept = marks_in(snapshot)
    if key_of(namespace) not in kept:
        return None
    sequence, asset, queue, batch, lease = (kept.get(f"{PREFIX}{namespace}.{name}", "") for name in Mark._fields)
    return Mark(int(sequence), asset, queue, int(batch or 0), lease)


def all_marks(metadata: TableMetadata) -> dict[str, str]:
    """What the next snapshot has to carry on."""
    return next((found for each in ancestors(metadata) if (found := marks_in(each))), {})


def current_mark(metadata: TableMetadata, namespace: str, resume_after: int | None = None) -> Mark | None:
    """How far the queue's log is in the table; none if nothing of it ever was.

    Raises ``WatermarkLost`` where that cannot be told, because somebody else's expiry removed all snapshots that said
    so; ``resume_after`` is then taken for the answer.
    """
    for snapshot in ancestors(metadata):
        if marks_in(snapshot):
            return mark_of(snapshot, namespace)
    current = metadata.current_snapshot()
    since = metadata.properties.get(since_key(namespace))
    if current is None or since is None or (current.sequence_number or int(since)) < int(since):
        return None  # never fed from this queue, or rolled back to before it was
    last = metadata.properties.get(key_of(namespace))
    if resume_after is not None:
        return Mark(resume_after, "", "", 0, "")
    raise WatermarkLost(
        f"no snapshot that is left says how far the queue {namespace!r} was committed: all of them were expired by "
        f"another program. The last number known is {last}. If the table was not rolled back since, go on with "
        f"commit_published(..., resume_after={last})"
    )


def noted(metadata: TableMetadata, namespace: str, mark: Mark) -> dict[str, str]:
    """Table properties that tell a table whose marks are lost from one that never had any. Nobody goes on from them."""
    since = metadata.properties.get(since_key(namespace), str(metadata.next_sequence_number()))
    return {since_key(namespace): since, key_of(namespace): str(mark.sequence)}


def check(mark: Mark, queue: LeaseQueue, asset: str) -> None:
    """Refuse to go on from a mark that is not about this asset, this queue and this queue's past."""
    where = f"the queue {queue.namespace!r}"
    if mark.asset and mark.asset != asset:
        raise LogMismatch(f"asset: the table holds {mark.asset!r} of {where}, so {asset!r} needs a table of its own")
    if mark.queue and mark.queue != queue.queue_id:
        raise LogMismatch(
            f"queue: the table was fed from another queue that was also called {queue.namespace!r}; "
            "give the new queue another namespace, or another table"
        )
    head = queue.stats().head
    if mark.sequence > head or not _is_in_log(queue, mark):
        raise LogMismatch(
            f"queue: the table has {where} up to number {mark.sequence}, but the log (which ends at {head}) tells "
            "another story: the database was replaced by an older copy. Roll the table back to a snapshot from before "
            "that copy, or start a new table"
        )


def _is_in_log(queue: LeaseQueue, mark: Mark) -> bool:
    """Whether the last batch of the table is in the log where it was; what is pruned cannot be asked and passes."""
    if not mark.batch:
        return True
    try:
        found, _ = queue.completions(mark.batch - 1, limit=1)
    except EventsPruned:
        return True
    return bool(found) and (found[0].sequence_number, found[0].lease_id) == (mark.batch, mark.lease)
