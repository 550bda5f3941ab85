"""An Iceberg table that is fed from the log of a queue: every published batch once, in the order of the log."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg
import sqlalchemy as sa
from fsspec.core import url_to_fs

from lease_core import LeaseQueue, limits
from lease_core.errors import EventsPruned, InvalidInput, StoreFull
from lease_core.replication.sinks.sql import no_room
from omnirelay_dagster.iceberg import watermark
from omnirelay_dagster.iceberg.catalog import MISSING, open_catalog
from omnirelay_dagster.iceberg.errors import CommitContended, FilesWrong, SchemaDrift, SnapshotExpired
from omnirelay_dagster.iceberg.log_reading import next_chunk
from omnirelay_dagster.iceberg.schema_drift import evolution
from omnirelay_dagster.iceberg.watermark import Mark
from omnirelay_dagster.io_manager import FencedIOManager

try:
    from omnirelay_dagster.iceberg import committing, creating, tidying
except ImportError as error:
    raise ImportError(f"{MISSING} ({error})") from error

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import DataScan, Table
    from pyiceberg.table.snapshots import Snapshot

_MOST_ATTEMPTS = 100
_LONGEST_PAUSE = 0.5


class Commit(NamedTuple):
    """One snapshot that was committed. ``sequence`` is how far the log is in the table with it."""

    snapshot_id: int
    sequence: int
    batches: int
    files: int
    rows: int
    rewritten: int


_NOTHING = Commit(0, 0, 0, 0, 0, 0)


class CommitReport(NamedTuple):
    """What a call has committed. ``snapshot_id`` and ``sequence`` are where the table stands, by whomever.

    ``rewritten`` of the batches' files were copied into the table's folder, as Iceberg cannot take them as they are.
    """

    snapshot_id: int | None
    sequence: int
    commits: int
    batches: int
    files: int
    rows: int
    rewritten: int
    total_rows: int
    total_files: int


class IcebergTable:
    """A table ``name`` (such as ``lake.orders``) in a catalog: a database URL with a ``warehouse``, or pyiceberg's own.

    It is made when the first batch is committed: with the columns of ``schema`` or else of that batch, partitioned by
    ``partition_by`` (``"country"``, ``"day(at)"``, ``"bucket(16, id)"``). Batches with other columns are refused unless
    ``evolve`` declares it: ``add_columns``, ``widen_types``, ``omit_columns``, or ``True`` for all of them.

    ``properties`` are those of the table. For settings of the catalog, such as S3's, give it as ``open_catalog(...)``.

    The newest ``keep_snapshots`` can be read as of their numbers; older ones are forgotten as new ones come, so that a
    commit takes as long after a year as on the first day.
    """

    def __init__(
        self,
        name: str,
        catalog: str | Catalog,
        warehouse: str | os.PathLike[str] | None = None,
        *,
        schema: pa.Schema | Schema | None = None,
        partition_by: str | Iterable[str] = (),
        evolve: Iterable[str] | bool = (),
        keep_snapshots: int = 25,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(name, str) or not all(part.strip() for part in name.split(".")) or "." not in name:
            raise InvalidInput("name", f"{name!r}: a table is called by its namespace and name, such as 'lake.orders'")
        self.name = name
        self.partition_by = [partition_by] if isinstance(partition_by, str) else list(partition_by)
        for text in self.partition_by:
            creating.transform(text)
        self.evolve = evolution(evolve)
        self.keep_snapshots = limits.count("keep_snapshots", keep_snapshots, 1_000_000)
        self._schema = schema
        self._properties = dict(properties or {})
        if isinstance(catalog, str):
            if warehouse is None:
                raise InvalidInput("warehouse", "say where the table's files go: a folder, or s3://bucket/prefix")
            catalog = open_catalog(catalog, warehouse)
        self.catalog: Catalog = catalog

    def __repr__(self) -> str:
        return f"IcebergTable({self.name!r})"

    # Feeding

    def commit_published(
        self,
        source: FencedIOManager,
        asset: str | dg.AssetKey,
        *,
        batches_per_commit: int = 100,
        files_per_commit: int = 1_000,
        as_of: int | None = None,
        resume_after: int | None = None,
        progress: Callable[[Commit], None] | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> CommitReport:
        """Bring the table up to what is published of ``asset`` now (or up to number ``as_of``), every batch once.

        Any number of processes may do this at once, and any of them may die at any moment: a batch is in the table
        together with the note that it is, or not at all. Batches come in the order of the log, up to
        ``batches_per_commit`` of them in a snapshot. ``progress`` is told of each snapshot, and ``step`` of each step
        on the way to one.
        """
        subject = asset if isinstance(asset, str) else asset.to_escaped_user_string()
        limits.count("batches_per_commit", batches_per_commit, 100_000)
        limits.count("files_per_commit", files_per_commit, 1_000_000)
        feeding = _Feeding(self, source, subject, batches_per_commit, files_per_commit, as_of, resume_after, step)
        done: list[Commit] = []
        while (commit := feeding.next()) is not None:
            if commit.batches:
                done.append(commit)
                if progress is not None:
                    progress(commit)
        mark = feeding.note()
        return _report(feeding.table, mark, done)

    def waiting(self, source: FencedIOManager, asset: str | dg.AssetKey, most: int = 1_000) -> int:
        """How many published batches are not in the table yet, counted up to ``most``."""
        subject = asset if isinstance(asset, str) else asset.to_escaped_user_string()
        mark = self.watermark(source.queue.namespace)
        queue = source.queue.get_queue()
        after, done = (0, "") if mark is None else (mark.sequence, mark.lease)
        return len(next_chunk(queue, subject, after, most, done=done).batches)

    # Reading

    def load(self) -> Table | None:
        """pyiceberg's table, as it is now; none if nothing was committed to it yet."""
        from pyiceberg.exceptions import NoSuchTableError

        try:
            return self.catalog.load_table(self.name)
        except NoSuchTableError:
            return None

    @property
    def metadata_location(self) -> str:
        """The address of the table's metadata now, which is how DuckDB and others without the catalog open it."""
        return self._there().metadata_location

    def watermark(self, namespace: str) -> Mark | None:
        """How far the log of a queue is in the table."""
        table = self.load()
        return None if table is None else watermark.current_mark(table.metadata, namespace)

    def snapshot_as_of(self, namespace: str, number: int) -> Snapshot:
        """The newest snapshot that holds nothing of the queue's log beyond ``number``."""
        metadata = self._there().metadata
        oldest: int | None = None
        for snapshot in watermark.ancestors(metadata):
            mark = watermark.mark_of(snapshot, namespace)
            if mark is not None:
                if mark.sequence <= number:
                    return snapshot
                oldest = mark.sequence
        if oldest is None:
            raise InvalidInput("namespace", f"nothing of a queue {namespace!r} is in {self.name}")
        raise SnapshotExpired(
            f"{self.name} can be read as of number {oldest} of {namespace!r} and later, not of {number}: what was "
            f"before is not kept (keep_snapshots={self.keep_snapshots}), or was never a snapshot of its own"
        )

    def scan(self, *, namespace: str | None = None, as_of: int | None = None, **arguments: Any) -> DataScan:
        """pyiceberg's scan (``row_filter``, ``selected_fields``, …), as of number ``as_of`` of a queue's log."""
        table = self._there()
        if as_of is not None:
            if namespace is None:
                raise InvalidInput("namespace", "as_of is a number of a queue's log: say of which")
            arguments["snapshot_id"] = self.snapshot_as_of(namespace, as_of).snapshot_id
        return table.scan(**arguments)

    def data_files(self) -> set[str]:
        """The addresses of all files that any snapshot of the table needs; for ``FencedIOManager.vacuum(keep=...)``."""
        table = self.load()
        return set() if table is None else tidying.referred_data(table)

    def _there(self) -> Table:
        table = self.load()
        if table is None:
            raise InvalidInput("name", f"there is no table {self.name} yet: nothing was committed to it")
        return table

    # Tidying

    def tidy(self, older_than: float | timedelta = timedelta(days=1), *, dry_run: bool = False) -> list[str]:
        """Remove files in the table's own folder that no snapshot needs, older than ``older_than`` (seconds).

        Those are manifests of expired snapshots and what committers that died had begun. Give readers that opened the
        table earlier, and committers at work, the time they need: they know no other protection.
        """
        age = older_than if isinstance(older_than, timedelta) else timedelta(seconds=older_than)
        table = self.load()
        if table is None:
            return []
        found = tidying.orphans(table, age)
        for address in found if not dry_run else ():
            with suppress(FileNotFoundError):  # somebody else tidies as well
                table.io.delete(address)
        return found


def _report(table: Table | None, mark: Mark | None, done: list[Commit]) -> CommitReport:
    snapshot = None if table is None else table.metadata.current_snapshot()
    summary = {} if snapshot is None or snapshot.summary is None else snapshot.summary.additional_properties
    return CommitReport(
        None if snapshot is None else snapshot.snapshot_id,
        0 if mark is None else mark.sequence,
        len(done),
        sum(each.batches for each in done),
        sum(each.files for each in done),
        sum(each.rows for each in done),
        sum(each.rewritten for each in done),
        int(summary.get("total-records", 0)),
        int(summary.get("total-data-files", 0)),
    )


class _Feeding:
    """One call of ``commit_published``: chunk by chunk, each from where the table says it stands."""

    def __init__(
        self,
        owner: IcebergTable,
        source: FencedIOManager,
        subject: str,
        most_batches: int,
        most_files: int,
        as_of: int | None,
        resume_after: int | None,
        step: committing.Step,
    ) -> None:
        self._owner, self._subject, self._step = owner, subject, step
        self._most_batches, self._most_files, self._as_of = most_batches, most_files, as_of
        self._resume_after = resume_after
        self._queue: LeaseQueue = source.queue.get_queue()
        self._fs, base = url_to_fs(source.base_path, **source.storage_options)
        self._base = base.rstrip("/")
        self._reader = f"omnirelay.iceberg.{owner.name}"
        self._kept = False
        self._ended = False
        self._size = 0
        self.table: Table | None = None
        """The table as it was when last looked at."""
        self._rowless = (-1, 0)
        """From the mark at the first number up to the second there are only batches without a row."""

    def next(self) -> Commit | None:
        """Commit the next batches; none if there are no more. Others that commit at the same time are waited for."""
        from pyiceberg.exceptions import CommitFailedException

        for attempt in range(0 if self._ended else _MOST_ATTEMPTS):
            try:
                return self._commit_some()
            except (FilesWrong, SchemaDrift):
                if self._size <= 1:
                    raise
                # One batch must not keep those before it out: fewer at a time, until it is alone.
                self._most_batches = self._size // 2
                return _NOTHING
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise self._full(error) from error
            except (CommitFailedException, sa.exc.DBAPIError) as error:
                if no_room(error):
                    raise self._full(error) from error
                # Somebody else committed; or the database went away in the middle, and then nobody knows whether this
                # landed. The table's own mark does: start over from there.
                last = error
                time.sleep(random.uniform(0.1, 1) * min(_LONGEST_PAUSE, 0.01 * 2 ** min(attempt, 10)))
        if self._ended:
            return None
        raise CommitContended(
            f"{self._owner.name}: nothing could be committed in {_MOST_ATTEMPTS} attempts; the last one ended with "
            f"{type(last).__name__}. Nothing is lost: call it again when the catalog is less busy"
        ) from (last if isinstance(last, CommitFailedException) else last.orig)

    def _full(self, error: Exception) -> StoreFull:
        cause = getattr(error, "orig", error)
        return StoreFull(
            f"{self._owner.name}: no space is left for the table or its catalog ({cause}). What was committed before "
            "stays, and nothing of this commit can be seen: free space, and call it again"
        )

    def _commit_some(self) -> Commit | None:
        table = self.table = self._owner.load()
        mark = self._mark(table)
        self._step("loaded")
        after, done = (0, "") if mark is None else (mark.sequence, mark.lease)
        start = self._rowless[1] if self._rowless[0] == after else after
        chunk = next_chunk(self._queue, self._subject, start, self._most_batches, done=done, as_of=self._as_of)
        self._size = len(chunk.batches)
        self._step("read")
        if not chunk.batches:
            return None
        planned = committing.plan(self._fs, self._base, chunk.batches, self._most_files)
        self._step("planned")
        last = planned.batches[-1]
        whole = len(planned.batches) == len(chunk.batches)
        ended = whole and chunk.ended
        new = Mark(
            chunk.upto if whole else last.upto,
            self._subject,
            self._queue.queue_id,
            last.upto,
            last.published.lease_id,
        )
        if not planned.footers:
            self._rowless, self._ended = (after, new.sequence), ended
            return _NOTHING
        if table is None:
            table = self.table = self._create(planned)
            if watermark.current_mark(table.metadata, self._queue.namespace) is not None:
                return _NOTHING  # somebody else made it, and is at work already
        commit, all_of_them = self._commit(table, planned, new, after)
        self._ended = ended and all_of_them
        return commit

    def _mark(self, table: Table | None) -> Mark | None:
        namespace = self._queue.namespace
        mark = None if table is None else watermark.current_mark(table.metadata, namespace, self._resume_after)
        if mark is not None:
            watermark.check(mark, self._queue, self._subject)
        self._keep_log(0 if mark is None else mark.sequence)
        return mark

    def _create(self, planned: committing.Planned) -> Table:
        owner = self._owner
        schema = creating.columns_of(planned.footers[0]) if owner._schema is None else owner._schema
        table = creating.create(owner.catalog, owner.name, schema, owner.partition_by, owner._properties)
        self._step("created")
        return table

    def _commit(self, table: Table, planned: committing.Planned, mark: Mark, after: int) -> tuple[Commit, bool]:
        landed, took = committing.commit(
            table,
            self._fs,
            planned,
            mark,
            self._queue.namespace,
            self._owner.evolve,
            self._owner.keep_snapshots,
            self._step,
        )
        self._step("committed")
        whole = len(took.batches) == len(planned.batches)
        upto = mark.sequence if whole else took.batches[-1].upto
        if landed is None:
            self._rowless = (after, upto)
            return _NOTHING, whole
        return Commit(landed.snapshot_id, upto, len(took.batches), landed.files, landed.rows, landed.rewritten), whole

    def _keep_log(self, after: int) -> None:
        """Have the log kept from the mark on, also should the IO manager's own reader be dropped to shorten it."""
        if self._kept:
            return
        try:
            self._queue.register_reader(self._reader, after)
        except EventsPruned as pruned:
            if after:
                raise
            self._queue.register_reader(self._reader, pruned.oldest - 1)
        self._kept = True

    def note(self) -> Mark | None:
        """Let the log go up to where the table stands, which is given."""
        table = self.table
        mark = None if table is None else watermark.current_mark(table.metadata, self._queue.namespace, 0)
        if mark is not None and mark.sequence:
            self._queue.advance_reader(self._reader, mark.sequence)
        self._step("noted")
        return mark
