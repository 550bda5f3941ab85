"""What was pruned from the log, read from its archive: the segments that an ``ObjectStoreSink`` keeps.

A reader that is given an archive sees one log. What the database no longer has comes from there, also when pruning
overtakes a query that is already running.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from urllib.parse import unquote

from lease_core.errors import InvalidInput
from lease_core.log import expand, gather
from lease_core.model import LeaseEvent
from lease_core.replication.archive import check_owner, check_same
from lease_core.replication.errors import CorruptCopy, SinkUnavailable
from lease_core.replication.sinks.object_store import read_segments, without_secrets
from omnirelay_dagster.spark.log_columns import LogDocument
from omnirelay_dagster.spark.log_reading import Log, LogHead, RangePruned, open_log, with_variables


class Archive:
    """The archived segments of one namespace at ``url``, which may name environment variables."""

    def __init__(self, url: str, namespace: str) -> None:
        address = with_variables("archive", url)
        if address.startswith("file://") and not Path(unquote(address.removeprefix("file://"))).is_dir():
            raise SinkUnavailable(f"archive: there is no folder {address}, or it cannot be seen from here")
        if "://" not in address:
            raise InvalidInput("archive", "is no address of an object store; use file:///path, s3://bucket/path, ...")
        self._copy = read_segments(address, namespace)

    def first(self) -> int | None:
        """The number of its first event; none if it is empty."""
        with without_secrets():
            return self._copy.first()

    def queue_id(self) -> str | None:
        """The queue whose log it is, if it says so."""
        with without_secrets():
            return self._copy.queue_id

    def event(self, number: int) -> LeaseEvent | None:
        """One of its events; none if it does not reach that far, or is damaged there."""
        with without_secrets(), suppress(CorruptCopy):
            return next(self._copy.read(number - 1), None)
        return None

    def documents(self, lowest: int, highest: int, since: int | None, until: int | None) -> Iterator[LogDocument]:
        """Its events ``lowest`` to ``highest``, as many as it has, in the form that the log has them."""
        with without_secrets():
            events = takewhile(lambda event: event.sequence_number <= highest, self._copy.read(lowest - 1))
            for group in gather(events):
                within = (since is None or group.at >= since) and (until is None or group.at <= until)
                yield LogDocument(group.first, group.last, group.document() if within else None)


class ArchivedLog:
    """A log and its archive as one. ``pruned`` of its head is what neither of them has."""

    def __init__(self, log: Log, archive: Archive) -> None:
        self._log, self._archive = log, archive
        self._compared = False

    def head(self) -> LogHead:
        head = self._log.head()
        if not head.pruned:
            return head
        first = self._archive.first()
        return head if first is None else head._replace(pruned=min(head.pruned, first - 1))

    def documents(
        self, ns: int, lowest: int, highest: int, since: int | None = None, until: int | None = None
    ) -> Iterator[LogDocument]:
        after = lowest - 1
        while after < highest:
            try:
                for document in self._log.documents(ns, after + 1, highest, since, until):
                    yield document
                    after = document.last
            except RangePruned as gap:
                self._compare(ns, gap.oldest)
                missing = min(highest, gap.oldest - 1)
                for document in self._archive.documents(after + 1, missing, since, until):
                    if document.first > after + 1:
                        raise RangePruned(after, document.first) from None
                    yield document
                    after = document.last
                if after < missing:  # the archive ends before what is left begins
                    raise RangePruned(after, gap.oldest) from None

    def _compare(self, ns: int, number: int) -> None:
        """See once that the archive is of this log, by the oldest event that both should have."""
        if self._compared:
            return
        head, ours = self._log.head(), None
        try:
            for found in self._log.documents(ns, number, min(number, head.number)):
                ours = next(expand(self._log.namespace, found.first, bytes(found.body), number - 1))
        except RangePruned:
            return  # pruned further meanwhile: whoever is told of that looks again
        if not check_same(ours, self._archive.event(number), number):
            check_owner(head.queue_id, self._archive.queue_id(), number)
        self._compared = True


@contextmanager
def open_archived(url: str, namespace: str, archive: str | None, fetch: str = "auto") -> Iterator[Log | ArchivedLog]:
    """The log of ``namespace``, and its archive with it if there is one."""
    with open_log(url, namespace, fetch) as log:
        yield log if archive is None else ArchivedLog(log, Archive(archive, namespace))
