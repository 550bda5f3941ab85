"""A batch of leased work: what an asset's body gets, and what holds it while the body runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from lease_core import AckResult, Lease, LeaseError, LeaseLost, LeaseQueue, WorkItem
from lease_core.hold import Hold

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from omnirelay_dagster.spark.job_group import SparkGroup

_SAY_EVERY = 10.0
_NO_DATAFRAMES = "pandas and Arrow are not installed: pip install 'omnirelay-dagster[dataframes]'"

in_process: WeakValueDictionary[str, LeasedBatch] = WeakValueDictionary()
"""Batches that are open in this process, by lease id: how an IO manager finds the batch whose output it stores."""


class LeasedBatch:
    """Leased items, kept alive by heartbeats until they are completed, failed or released.

    Iterating gives the leases one by one and raises ``LeaseLost`` as soon as they are lost; so do ``check`` and
    ``progress``. Whatever a body does after that, its output is refused.
    """

    def __init__(self, queue: LeaseQueue, leases: Sequence[Lease], say: Callable[[str], None]) -> None:
        self.queue = queue
        self.leases: tuple[Lease, ...] = tuple(leases)
        self.completed = False
        self._open = {lease.token: lease for lease in leases}
        self._hold: Hold = queue.hold(self.leases, self._tell)
        self.say = say
        self._said_at: dict[str, float] = {}
        self._bar: Any = None
        self._bars: dict[str, Any] = {}
        self._spark_groups: list[SparkGroup] = []
        self._began_at = time.monotonic()
        if leases:
            in_process[self.id] = self

    @property
    def id(self) -> str:
        """The lease id that all leases of the batch share."""
        return self.leases[0].token.lease_id if self.leases else ""

    @property
    def items(self) -> list[WorkItem]:
        """The work, in the order in which it was leased."""
        return [lease.item for lease in self.leases]

    @property
    def remaining(self) -> tuple[Lease, ...]:
        """The leases that were not failed, released or completed yet."""
        return tuple(self._open.values())

    @property
    def lost(self) -> tuple[Lease, ...]:
        """The leases that can no longer be trusted. Empty, and so false, while all is well."""
        return tuple(lease for lease in self._hold.lost if lease.token in self._open)

    def check(self) -> None:
        """Raise ``LeaseLost`` if any lease of the batch was lost."""
        if self.lost:
            self._hold.check()

    def raise_if_lost(self, error: BaseException) -> None:
        """Raise ``LeaseLost`` because of ``error`` if a lease was lost: then that is why the work failed."""
        try:
            self.check()
        except LeaseLost as lost:
            raise lost from error

    def _tell(self, lost: tuple[Lease, ...]) -> None:
        for group in tuple(self._spark_groups):
            group.lost()

    def __len__(self) -> int:
        return len(self.leases)

    def __iter__(self) -> Iterator[Lease]:
        for lease in self.leases:
            self.check()
            yield lease

    def fail(
        self, lease: Lease, error: BaseException | str, *, requeue: bool = True, delay: float | None = None
    ) -> None:
        """Give one item up for this attempt; the rest of the batch goes on."""
        self._close([lease])
        self.queue.fail(lease.token, error, requeue, delay)

    def release(self, lease: Lease) -> None:
        """Hand one item back, without using up an attempt; the rest of the batch goes on."""
        self._close([lease])
        self.queue.release(lease.token)

    def complete(self, result: Any = None) -> AckResult:
        """Finish what remains, all of it or, if any lease was lost, none of it (``LeaseRefused``)."""
        tokens = list(self._open)
        outcome = self.queue.complete(tokens, result, atomic=True).raise_if_refused()
        self.completed = True
        self._close(self.remaining)
        return outcome

    def fail_all(self, error: BaseException | str, *, requeue: bool = True, delay: float | None = None) -> None:
        """Give up what remains."""
        left = self._close(self.remaining)
        if left:
            self.queue.fail([lease.token for lease in left], error, requeue, delay)

    def release_all(self) -> None:
        """Hand back what remains."""
        left = self._close(self.remaining)
        if left:
            self.queue.release([lease.token for lease in left])

    def _close(self, leases: Sequence[Lease]) -> list[Lease]:
        closed = [lease for lease in leases if self._open.pop(lease.token, None)]
        self._hold.forget(closed)
        return closed

    def progress(self, done: int, of: int | None = None, note: str = "") -> None:
        """Say how far the work is: in the run's log now and then and, on a terminal, as a bar. Raises if it is lost."""
        self.check()
        total = len(self.leases) if of is None else of
        share = f" ({100 * done // total} %)" if total else ""
        self.show("batch", done, total, f"{done} of {total}{share} {note}".rstrip(), note or "leased batch")

    def show(self, what: str, done: int, total: int, text: str, label: str = "") -> None:
        """Show how far ``what`` is: ``text`` in the run's log now and then and, on a terminal, a bar."""
        if sys.stderr.isatty():
            self._draw(what, done, total, label or what)
        now = time.monotonic()
        if now - self._said_at.get(what, self._began_at) >= _SAY_EVERY or (done >= total and what == "batch"):
            self._said_at[what] = now
            self.say(text)

    def _draw(self, what: str, done: int, total: int, label: str) -> None:
        if self._bar is None:
            from rich.progress import Progress

            self._bar = Progress(transient=True)
            self._bar.start()
        if what not in self._bars:
            self._bars[what] = self._bar.add_task(label, total=total)
        self._bar.update(self._bars[what], completed=done, total=total, description=label)

    def metadata(self) -> dict[str, Any]:
        """What ties a materialization to its leases: queue, lease, owner, and the range of attempts and fences."""
        if not self.leases:
            return {}
        tokens = [lease.token for lease in self.leases]
        return {
            "omnirelay/queue": self.queue.namespace,
            "omnirelay/lease": self.id,
            "omnirelay/owner": self.leases[0].owner_peer_id,
            "omnirelay/items": len(tokens),
            "omnirelay/attempt": max(token.attempt for token in tokens),
            "omnirelay/fence": max(token.fence for token in tokens),
        }

    def records(self) -> list[dict[str, Any]]:
        """The items as plain dictionaries, one each, with the id and attempt of its lease."""
        return [_record(lease) for lease in self.leases]

    def to_pandas(self) -> pd.DataFrame:
        """The items as a data frame, one row each."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(f"to_pandas: {_NO_DATAFRAMES} ({error})") from error
        return pd.DataFrame(self.records(), columns=list(_COLUMNS))

    def to_arrow(self) -> pa.Table:
        """The items as an Arrow table, one row each; the schema is the same for every batch."""
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ImportError(f"to_arrow: {_NO_DATAFRAMES} ({error})") from error
        kinds = {
            "int": pa.int64(),
            "str": pa.string(),
            "bytes": pa.binary(),
            "map": pa.map_(pa.string(), pa.string()),
            "time": pa.timestamp("us", tz="UTC"),
        }
        columns = {name: [record[name] for record in self.records()] for name in _COLUMNS}
        columns["attributes"] = [list(each.items()) for each in columns["attributes"]]
        return pa.table({name: pa.array(columns[name], kinds[kind]) for name, kind in _COLUMNS.items()})

    def to_spark(self, spark: Any = None) -> DataFrame:
        """The items as a Spark DataFrame, one row each; the columns are those of ``to_arrow``.

        ``spark`` is a session, or dagster-pyspark's resource; by default the session that is active. What this thread
        runs on it from now on is in the lease's job group (``spark_group``).
        """
        from omnirelay_dagster.spark.items import items_frame

        return items_frame(self.spark_group(spark).session, self.to_arrow())

    def spark_group(self, spark: Any = None) -> SparkGroup:
        """Put what this thread runs on Spark from now on into a job group named after the lease, until the batch ends.

        The group is cancelled when the lease is lost or the work is interrupted. The body of a leased asset or op need
        not call this for sessions and resources that it has as parameters.
        """
        from omnirelay_dagster.spark.job_group import SparkGroup
        from omnirelay_dagster.spark.session import session_of

        session = session_of(spark)
        for group in self._spark_groups:
            if group.session is session:
                return group
        self.check()
        group = SparkGroup(self, session)
        self._spark_groups.append(group)
        return group

    def interrupt_spark_groups(self) -> None:
        """A signal ends the work: have whatever runs for this batch on Spark cancelled. For signal handlers."""
        for group in self._spark_groups:
            group.interrupt()

    def close_spark_groups(self, error: BaseException | None = None) -> None:
        """Cancel whatever still runs for this batch on Spark, and give the thread back as it was."""
        while self._spark_groups:
            self._spark_groups.pop().close(error)

    def __enter__(self) -> LeasedBatch:
        self._hold.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close_spark_groups(error)
        self._hold.__exit__(None, None, None)
        if self._bar is not None:
            self._bar.stop()


_COLUMNS: Mapping[str, str] = {
    "sequence_id": "int",
    "attempt": "int",
    "resource_type": "str",
    "resource_id": "str",
    "partition_key": "str",
    "priority": "int",
    "request_id": "str",
    "attributes": "map",
    "payload_encoding": "str",
    "body": "bytes",
    "enqueued_at": "time",
}


def _record(lease: Lease) -> dict[str, Any]:
    item = lease.item
    return {
        "sequence_id": lease.token.sequence_id,
        "attempt": lease.token.attempt,
        "resource_type": item.resource_type,
        "resource_id": item.resource_id,
        "partition_key": item.partition_key,
        "priority": item.priority,
        "request_id": item.request_id,
        "attributes": item.attributes,
        "payload_encoding": item.payload_encoding,
        "body": item.body,
        "enqueued_at": lease.enqueued_at,
    }


@contextmanager
def lease_batch(
    queue: LeaseQueue,
    peer_id: str,
    limit: int = 100,
    *,
    wait: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[LeasedBatch]:
    """Lease a batch and hold it for the ``with`` block. The plain way, without assets or ops.

    A block that ends well completes what remains of the batch, unless it did so itself. One that raises fails what
    remains, with the error; one that is interrupted hands it back.
    """
    batch = LeasedBatch(queue, queue.lease(peer_id, limit, wait=wait), say)
    with batch:
        try:
            yield batch
        except BaseException as error:
            batch.close_spark_groups(error)
            give_up(batch, error)
            raise
        batch.close_spark_groups()
        if batch.remaining:
            batch.complete()


def give_up(batch: LeasedBatch, error: BaseException, *, requeue: bool = True, delay: float | None = None) -> None:
    """Fail what remains with the error or, if the work was merely interrupted, hand it back.

    If even that fails the leases expire by themselves; the first error matters more.
    """
    try:
        if isinstance(error, Exception):
            batch.fail_all(error, requeue=requeue, delay=delay)
        else:
            batch.release_all()
    except LeaseError as second:
        error.add_note(f"and its leases could not be handed back, they will expire: {second}")
