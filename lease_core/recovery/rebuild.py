"""A queue made from a copy of its log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from lease_core.config import QueueConfig
from lease_core.errors import InvalidInput
from lease_core.queue import LeaseQueue
from lease_core.recovery.copy import PAGE, Copy, Leases, queue_of
from lease_core.recovery.progress import Progress, on_terminal
from lease_core.recovery.strict import strictly
from lease_core.replication.contract import EventSource
from lease_core.store.base import Clock

logger = logging.getLogger(__name__)


def rebuild(
    source: EventSource,
    url: str | sa.URL,
    *,
    namespace: str | None = None,
    config: QueueConfig | None = None,
    upto: int | None = None,
    snapshot: str | Path | None = None,
    leases: Leases = "keep",
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> LeaseQueue:
    """Make the queue anew at ``url`` from any copy of its log, and open it.

    ``source`` is anything with ``events(after, limit)``: a queue, a hub, ``read_segments(...)``, ``read_jsonl(...)``.
    The result is the queue as of the source's last event, or as of number ``upto``: every item in the state, with the
    attempts, errors, results and tokens that it had, and the log itself, which goes on with the next number. What the
    queue had forgotten after its retention may be there again until it is forgotten anew, and in an exclusive queue an
    item that was drained and came back may have another place among those of its key.

    Leases that were active then stay so (``leases="keep"``): their holders' tokens are good until they end, and what
    nobody completes expires and is handed out again. ``leases="release"`` hands them back at once without burning an
    attempt; use it when the holders cannot reach the new queue. With ``snapshot`` the copy starts from that file and
    needs only the events after it.

    A rebuild that was interrupted goes on where it was when it is called again. Damage in the source is raised as
    ``CorruptCopy`` or ``ReplayDiverged`` at the first bad event, and nothing from there on is used; to settle for what
    is good before it, call again with ``upto`` one less.

    What a queue keeps beside its log comes along from a queue or a snapshot: the places of its readers, the outcomes of
    effects, its rules. Other copies do not have it, and of the rules only what ``config`` says holds. The original, if
    it lives, is not touched: ``Standby.promote`` is the way to replace a queue that still runs.
    """
    if leases not in ("keep", "release"):
        raise InvalidInput("leases", f"must be 'keep' or 'release' (got {leases!r})")
    if upto is not None and upto < 0:
        raise InvalidInput("upto", f"must be 0 or more (got {upto})")
    progress = progress or on_terminal("rebuilding", source)
    source = strictly(source)
    known = queue_of(source) is not None or snapshot is not None
    if not known and "exclusive" not in (config or QueueConfig()).model_fields_set:
        logger.warning(
            "the source does not say whether the queue was exclusive, or had marks or a capacity: it will have none. "
            "If it had, say so (config=, --exclusive) and rebuild into an empty database"
        )
    copy = Copy.open(source, url, namespace, config, clock, snapshot)
    try:
        if upto is not None and copy.number > upto:
            raise InvalidInput(
                "upto",
                f"is {upto}, but the copy there holds events up to {copy.number} already; choose an empty database",
            )
        goal = upto if upto is not None else _end_of(source)
        while copy.advance(source, PAGE, upto):
            if progress is not None:
                progress(copy.number, goal if goal is None else max(goal, copy.number))
        if upto is not None and copy.number < upto:
            raise InvalidInput("upto", f"is {upto}, but the source ends with event {copy.number}")
        if copy.number == 0 and upto is None:
            raise InvalidInput(
                "source",
                f"holds no event of namespace {copy.namespace!r}; is it the right one? (upto=0 makes it empty)",
            )
        if progress is not None:
            progress(copy.number, copy.number)
        if queue := queue_of(source):
            copy.carry(queue)
        return copy.take_over(1, leases)
    except BaseException:
        copy.close()
        raise


def _end_of(source: Any) -> int | None:
    stats = getattr(source, "stats", None)
    return None if stats is None else int(stats().head)
