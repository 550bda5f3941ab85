"""What has been published, as the log tells it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from lease_core import LeaseError, LeaseQueue
from lease_core.errors import EventsPruned, InvalidInput
from lease_core.model import Completion

READER = "omnirelay.manifest"
"""The name under which the queue keeps its log: pruning it would make published outputs invisible."""


class NothingPublished(LeaseError):
    """An input was asked for that no completed lease has published yet (or not by the number asked for)."""

    code = "resourcelease.nothing_published"


class Published(NamedTuple):
    """One output that a completed lease points to. ``path`` is relative to the manager's ``base_path``."""

    sequence_number: int | None
    lease_id: str
    fence: int
    subject: str
    partition: str | None
    format: str
    path: str
    uri: str
    rows: int | None
    bytes: int


class Manifest:
    """What one queue's log says is published, remembered so that the next look reads only what has come since."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._kept = False
        self._cursor = 0
        self._last: Completion | None = None
        self._leases: set[str] = set()
        self._outputs: dict[str, list[Published]] = {}

    def keep_log(self, queue: LeaseQueue) -> None:
        """See to it that the log is not pruned under what is about to be published.

        The reader that is registered for this never moves on: the log is the only place that says what is published.
        """
        if not self._kept:
            try:
                queue.register_reader(READER)
            except EventsPruned as pruned:  # before anything was published here
                queue.register_reader(READER, pruned.oldest - 1)
            self._kept = True

    def outputs(self, queue: LeaseQueue, subject: str, as_of: int | None) -> tuple[list[Published], int]:
        """The subject's outputs up to number ``as_of`` (by default all), and that number."""
        with self._lock:
            self._read(queue, as_of)
            if as_of is not None and not 0 <= as_of <= self._cursor:
                raise InvalidInput("as_of", f"{as_of} is not a number of the log, which ends at {self._cursor}")
            number = self._cursor if as_of is None else as_of
            return [each for each in self._outputs.get(subject, ()) if (each.sequence_number or 0) <= number], number

    def lease_ids(self, queue: LeaseQueue) -> frozenset[str]:
        """All leases that were completed with a result."""
        with self._lock:
            self._read(queue, None)
            return frozenset(self._leases)

    def _read(self, queue: LeaseQueue, upto: int | None) -> None:
        if self._last is not None and not _is_in_log(queue, self._last):
            self._forget()  # the database was replaced, by a backup for instance
        while upto is None or self._cursor < upto:
            try:
                found, reached = queue.completions(self._cursor)
            except EventsPruned as pruned:
                if self._cursor:
                    raise
                found, reached = [], pruned.oldest - 1  # nothing was published before: see keep_log
            for completion in found:
                self._add(completion)
            if reached == self._cursor:
                return
            self._cursor = reached

    def _add(self, completion: Completion) -> None:
        """Note a completion; a batch that the log has in several pieces counts once, where it begins."""
        if completion.lease_id not in self._leases:
            self._leases.add(completion.lease_id)
            output = parse(completion)
            if output is not None:
                self._outputs.setdefault(output.subject, []).append(output)
        self._last = completion


_manifests: dict[tuple[str, str], Manifest] = {}


def manifest_of(queue: LeaseQueue) -> Manifest:
    """This process's manifest of the queue, whichever object it was opened as."""
    return _manifests.setdefault((queue.queue_id, queue.namespace), Manifest())


def _is_in_log(queue: LeaseQueue, completion: Completion) -> bool:
    found, _ = queue.completions(completion.sequence_number - 1, limit=1)
    return bool(found) and found[0] == completion


def parse(completion: Completion) -> Published | None:
    """The output that a completion's result describes; none if somebody else wrote that result."""
    result = completion.result
    if not isinstance(result, Mapping) or result.get("kind") != "omnirelay.output":
        return None
    return Published(
        completion.sequence_number,
        completion.lease_id,
        result["fence"],
        result["asset"],
        result.get("partition"),
        result["format"],
        result["path"],
        result["uri"],
        result.get("rows"),
        result.get("bytes", 0),
    )
