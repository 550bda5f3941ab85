"""One sink's delivery: its place in the log, its retries, its end. Lanes know nothing of each other."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

from lease_core.errors import EventsPruned, InvalidInput
from lease_core.model import LeaseEvent, Value
from lease_core.replication.backoff import Backoff
from lease_core.replication.batch import Batch
from lease_core.replication.contract import Checkpoints, HoldsPosition, Settles, Sink
from lease_core.replication.errors import CorruptCopy, HistoryDiffers, RefusedForGood
from lease_core.replication.pages import Pages
from lease_core.replication.refused import RefusedEvents
from lease_core.replication.telemetry import Telemetry

logger = logging.getLogger(__name__)

_FOR_GOOD = (CorruptCopy, HistoryDiffers, EventsPruned, InvalidInput)  # what no retry mends
_MOST_TAKEN = 8  # batches that a sink has taken and not yet forced to disk

OnRefusal = Literal["stop", "skip"]
Start = Literal["beginning", "oldest", "end"]


@dataclass(frozen=True)
class Rules:
    """How one sink is served. Durations are in seconds.

    A batch that is not full waits until its oldest event is ``linger`` old (by default what the sink prefers, mostly
    0). ``checkpoint_every`` bounds what a sink without a position of its own sees again after a crash.
    """

    batch_size: int = 1_000
    on_refusal: OnRefusal = "stop"
    start: Start = "beginning"
    linger: float | None = None
    checkpoint_every: float = 1.0
    backoff: Backoff = field(default_factory=Backoff)


class Step(Enum):
    """What became of one step."""

    DELIVERED = auto()
    IDLE = auto()
    WAITING = auto()
    STOPPED = auto()


class SinkStatus(Value, frozen=True):
    """Where one sink stands. ``state``: new, running, retrying or stopped; ``error`` says why it is not running."""

    name: str
    state: str
    position: int | None
    delivered: int
    behind: int | None
    failures_in_a_row: int
    refused: int
    error: str | None = None


class _Taken(NamedTuple):
    """A batch that the sink has, though perhaps not yet for good: its delivery began at ``since``."""

    events: int
    last: int
    queueing: float
    since: float


class _Stop(Exception):
    """This lane is over; the cause is its reason."""


class Lane:
    """Moves one sink along the log. ``step`` is for one thread at a time."""

    def __init__(
        self,
        sink: Sink,
        pages: Pages,
        checkpoints: Checkpoints | None,
        rules: Rules,
        refused: RefusedEvents | None,
        telemetry: Telemetry,
        stopping: Callable[[], bool],
    ) -> None:
        self.sink, self.rules = sink, rules
        self._pages, self._checkpoints, self._refused_events = pages, checkpoints, refused
        self._telemetry, self._stopping = telemetry, stopping
        self._reader = f"relay/{sink.name}"
        self._labels = {"omnirelay.sink": sink.name}
        if shard := getattr(sink, "shard", None):
            self._labels["omnirelay.shard"] = shard
        self._linger: float = getattr(sink, "linger", 0.0) if rules.linger is None else rules.linger
        self._state = "new"
        # found out once: to ask whether a sink has these methods takes longer than to keep a checkpoint
        self._settling = sink if isinstance(sink, Settles) and getattr(sink, "settles", True) else None
        self._placed = sink if isinstance(sink, HoldsPosition) else None
        self._position: int | None = None  # what to read on from. None: to be asked for
        self._taken: list[_Taken] = []
        self._unsure: list[_Taken] = []  # what was taken when something failed: the sink is asked what it has of it
        self._counted = 0  # the last event that telemetry was told of
        self._known = 0  # up to where the sink is known to have everything for good
        self._saved = -1
        self._saved_at = time.monotonic()
        self._retry_at = 0.0
        self._failures = self._delivered = self._refused = 0
        self._error: BaseException | None = None

    # One step

    def step(self) -> Step:
        """Deliver the next batch, if it is time to and if there is one. Raises nothing: a failure is a state."""
        if self._state == "stopped":
            return Step.STOPPED
        if time.monotonic() < self._retry_at:
            return Step.WAITING
        if self._failures:
            self._telemetry.retried(self._labels)
        try:
            moved = self._advance()
        except (_Stop, *_FOR_GOOD) as error:
            self._end(error.__cause__ or error)
            return Step.STOPPED
        except Exception as error:  # whatever a sink or the source raises, it concerns this lane alone
            self._fail(error)
            return Step.WAITING
        self._succeed()
        return Step.DELIVERED if moved else Step.IDLE

    def _advance(self) -> bool:
        if self._position is None:
            namespace = self._pages.namespace()
            if namespace is None:
                return False
            self._labels["omnirelay.namespace"] = namespace
            self._position = self._known = self._recall(namespace)
        try:
            batch = self._pages.after(self._position, self.rules.batch_size, fill=self._linger > 0)
        except EventsPruned:
            before, self._position = self._position, self._recall(self._pages.namespace() or "")
            if self._position <= before:
                raise
            self._known = self._position  # another relay has brought the same sink past what is gone
            return True
        found = batch is not None and not self._should_linger(batch)
        if batch is not None and found:
            self._count_read(batch)
            self._send(batch)
        if self._known != self._position and (
            not found or len(self._taken) >= _MOST_TAKEN or not self._pages.is_ready(self._position)
        ):
            self._settle()
        if self._age() >= self.rules.checkpoint_every:  # also while idle: a checkpoint is a write to the queue
            self.save()
        return found

    def _count_read(self, batch: Batch) -> None:
        """Count what was not read before: what is delivered again after a failure is the same event still."""
        if (new := batch.after(self._counted)) is not None:
            self._telemetry.read(self._labels, len(new))
            self._counted = batch.last

    def _should_linger(self, batch: Batch) -> bool:
        if len(batch) >= self.rules.batch_size or not self._linger:
            return False
        return (self._pages.now() - batch.oldest).total_seconds() < self._linger

    def _send(self, batch: Batch) -> None:
        """Deliver the batch; what is refused is cut smaller until it is clear which event it is."""
        parts = [batch]
        while parts and not self._stopping():
            part = parts.pop()
            try:
                self._deliver(part)
            except RefusedForGood as refusal:
                if len(part) == 1:
                    self._refuse(part.events[0], refusal)
                else:
                    parts.extend(reversed(part.halves()))
                    continue
            self._position = part.last
            if self._settling is None:
                self._settle()

    def _deliver(self, part: Batch) -> None:
        queueing = max(0.0, (self._pages.now() - part.oldest).total_seconds())
        taken = _Taken(len(part), part.last, queueing, time.monotonic())
        if self._settling is not None:
            self._settling.take(part)
        else:
            self.sink.deliver(part)
        self._taken.append(taken)

    def _settle(self) -> None:
        """Have the sink keep for good what it has taken; only then does it count."""
        if self._taken and self._settling is not None:
            self._settling.settle()
        self._count(self._taken)
        self._taken.clear()
        if self._position is not None:
            self._succeed()  # before it can be seen how far it is: a sink that has everything is not retrying
            self._known = self._position

    def _count(self, taken: Iterable[_Taken]) -> None:
        for events, last, queueing, since in taken:
            apply = time.monotonic() - since
            self._delivered += events
            # the sink has it: that the source cannot be asked how long its log is must not deliver it again
            behind = self._behind_if_known(last)
            self._telemetry.delivered(self._labels, events, queueing, apply, behind, self._age())

    def _refuse(self, event: LeaseEvent, refusal: RefusedForGood) -> None:
        self._refused += 1
        self._telemetry.refused(self._labels)
        if self.rules.on_refusal == "stop" or self._refused_events is None:
            self._settle()
            raise _Stop from RefusedForGood(refusal.reason, event.sequence_number)
        self._refused_events.add(self.sink.name, refusal.reason, event)
        logger.warning("sink %s refused event %d: %s", self.sink.name, event.sequence_number, refusal.reason)

    # Where it stands

    def _recall(self, namespace: str) -> int:
        """Where to go on: where the sink says it is, or else where its checkpoint is."""
        own = None if self._placed is None else self._placed.position(namespace)
        unsure, self._unsure = self._unsure, []
        self._count(each for each in unsure if own is not None and each.last <= own)
        head = self._pages.head(fresh=True)  # asked after the sink, so that it cannot be behind it
        if own is not None and head is not None and own > head:
            raise HistoryDiffers(
                f"sink {self.sink.name} holds events up to {own}, but the log ends at {head}: "
                "it is a copy of another queue, or the queue was made anew; give the sink an empty place"
            )
        kept = self._register(own)
        if own is None or (own == 0 and self.rules.start != "beginning"):
            return kept
        if own and getattr(self.sink, "compares", False):
            self._show_last(own)
        return own  # also where the checkpoint is further: what the sink has lost since it gets again

    def _show_last(self, own: int) -> None:
        """Deliver the last event that the sink holds once more: if it is not the same, this is another log."""
        try:
            last = self._pages.after(own - 1, 1)
        except EventsPruned:
            return
        if last is not None:
            self.sink.deliver(last)

    def _register(self, own: int | None) -> int:
        if self._checkpoints is None:
            return own or 0
        after = own or self._known
        if not after and self.rules.start == "end":
            after = self._pages.head(fresh=True) or 0
        try:
            kept = self._checkpoints.register_reader(self._reader, after)
        except EventsPruned as gap:
            if after or self.rules.start != "oldest":
                raise
            kept = self._checkpoints.register_reader(self._reader, gap.oldest - 1)
        self._saved = kept
        return kept

    def save(self) -> None:
        """Keep the checkpoint. If that fails the next one will do: a sink then sees some events again."""
        if self._checkpoints is None or self._position is None or self._known <= self._saved:
            self._saved_at = time.monotonic()
            return
        try:
            self._checkpoints.advance_reader(self._reader, self._known)
        except InvalidInput:  # it was dropped; made again here, unless this is no longer the log it was
            self._saved = self._checkpoints.register_reader(self._reader, self._known)
        except Exception as error:
            logger.warning("the checkpoint of sink %s could not be kept: %s", self.sink.name, error)
        else:
            self._saved, self._saved_at = self._known, time.monotonic()

    def status(self) -> SinkStatus:
        return SinkStatus(
            name=self.sink.name,
            state=self._state,
            position=self._known if self._state != "new" else None,
            delivered=self._delivered,
            behind=self._behind_if_known(self._known),
            failures_in_a_row=self._failures,
            refused=self._refused,
            error=None if self._error is None else _brief(self._error),
        )

    @property
    def wait(self) -> float:
        """Seconds until the next try."""
        return max(0.0, self._retry_at - time.monotonic())

    def rest(self) -> None:
        """Nothing more is delivered for now: settle what was, and keep the checkpoint. Raises nothing, as ``step``."""
        if self._state != "running":
            return
        try:
            self._settle()
            self.save()
        except _FOR_GOOD as error:
            self._end(error)
        except Exception as error:
            self._fail(error)

    def close(self) -> None:
        """Keep the checkpoint and let go of the sink. Raises nothing: other lanes are to be closed, too."""
        self.rest()
        release: Any = getattr(self.sink, "close", None)
        try:
            if release is not None:
                release()
        except Exception as error:
            logger.warning("sink %s could not be closed: %s", self.sink.name, _brief(error))

    def _behind_if_known(self, position: int) -> int | None:
        try:
            head = self._pages.head()
        except Exception:  # a status must be had also while the source is away
            return None
        return None if head is None else max(0, head - position)

    def _age(self) -> float:
        return time.monotonic() - self._saved_at

    # What becomes of it

    def _succeed(self) -> None:
        if self._failures:
            logger.info("sink %s is back after %d failures", self.sink.name, self._failures)
        self._state, self._failures, self._retry_at, self._error = "running", 0, 0.0, None

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        self._state, self._error = "retrying", error
        self._unsure += self._taken
        self._taken.clear()
        if self._placed is not None:
            self._position = None  # part of the batch may be there: ask the sink
        pause = self.rules.backoff.pause(self._failures, getattr(error, "retry_after", None))
        self._retry_at = time.monotonic() + pause
        self._telemetry.failed(self._labels, error, self._behind_if_known(self._known), self._age())
        if self._failures & (self._failures - 1) == 0:  # the 1st, 2nd, 4th, 8th ...: a sink down for hours stays quiet
            logger.warning(
                "sink %s failed %d times, next try in %.1f s: %s", self.sink.name, self._failures, pause, _brief(error)
            )

    def _end(self, cause: BaseException) -> None:
        self._state, self._error = "stopped", cause
        self._taken.clear()
        self._telemetry.failed(self._labels, cause, self._behind_if_known(self._known), self._age())
        logger.error("sink %s stopped at event %d: %s", self.sink.name, self._known, _brief(cause))


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2_000]
