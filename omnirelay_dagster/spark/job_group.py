"""All that a leased batch runs on Spark, as one job group: followed, and cancelled when the lease is gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from omnirelay_dagster.spark.progress import ConnectProgress, ContextProgress, Progress, Stages
from omnirelay_dagster.spark.session import is_connect, sessions_among

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from omnirelay_dagster.batch import LeasedBatch

LOOK_EVERY = 1.0
"""Seconds between looks at the stages."""

CANCEL_EVERY = 0.2
"""Seconds between cancels of a group whose lease is gone: a body that starts another job does not get far."""

_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


class Jobs(Protocol):
    """How the two kinds of session name, follow and cancel jobs."""

    progress: Progress

    def join(self) -> None:
        """What this thread runs from now on is in the group."""

    def leave(self) -> None:
        """What it runs from now on is not."""

    def hang_up(self) -> None:
        """A call of this thread was interrupted: forget about its answer."""

    def cancel(self) -> None:
        """Stop all that runs in the group. From any thread."""


class ContextJobs:
    """A classic session: a job group of its SparkContext."""

    def __init__(self, context: SparkContext, name: str, description: str) -> None:
        self._context = context
        self._name = name
        self._description = description
        self._before: dict[str, str | None] = {}
        self.progress: Progress = ContextProgress(context, name)

    def join(self) -> None:
        self._before = {key: self._context.getLocalProperty(key) for key in _PROPERTIES}
        self._context.setJobGroup(self._name, self._description, interruptOnCancel=True)

    def leave(self) -> None:
        if self._stopped():
            return
        for key, value in self._before.items():
            self._context.setLocalProperty(key, value)  # type: ignore[arg-type]

    def hang_up(self) -> None:
        """Drop this thread's connection to the JVM. An interrupted call has left its answer unread in there: the next
        call would wait for the job to end, and then take the answer for its own."""
        if self._stopped():
            return
        client = getattr(self._context._gateway, "_gateway_client", None)
        connection = getattr(client, "get_thread_connection", lambda: None)()
        if connection is not None:
            connection.close()

    def cancel(self) -> None:
        if not self._stopped():
            self._context.cancelJobGroup(self._name)

    def _stopped(self) -> bool:
        """Whether the body has stopped the session, and all that ran on it with it."""
        return self._context._jsc is None


class ConnectJobs:
    """A Spark Connect session: a tag on its operations."""

    def __init__(self, session: Any, name: str) -> None:
        self._session = session
        self._name = name
        self.progress: Progress = ConnectProgress(session)

    def join(self) -> None:
        self._session.addTag(self._name)

    def leave(self) -> None:
        self._session.removeTag(self._name)

    def hang_up(self) -> None: ...

    def cancel(self) -> None:
        self._session.interruptTag(self._name)


class SparkGroup:
    """The Spark jobs of one batch on one session, in a group named after the lease, until ``close``.

    Jobs that the thread that made the group starts are in it; so are those of ``pyspark.InheritableThread``s that it
    starts. When the lease is lost, the jobs are cancelled and so is every later one. ``close`` cancels what still
    runs, says what was done, and gives the thread back as it was.
    """

    def __init__(self, batch: LeasedBatch, session: SparkSession) -> None:
        self.session = session
        self.id = group_name(batch.queue.namespace, batch.id)
        self._batch = batch
        self._jobs: Jobs
        if is_connect(session):
            self._jobs = ConnectJobs(session, self.id)
        else:
            items = f"{len(batch)} item{'s' if len(batch) != 1 else ''} of {batch.queue.namespace}"
            self._jobs = ContextJobs(session.sparkContext, self.id, f"{items}, lease {batch.id}")
        self._closed = False
        self._interrupted = False
        self._ending = threading.Event()
        self._wake = threading.Event()
        self._jobs.join()
        self._watcher = threading.Thread(target=self._watch, name="lease-spark-jobs", daemon=True)
        self._watcher.start()

    def cancel(self) -> None:
        """Stop what runs in the group now."""
        _calmly(self._jobs.cancel)

    def lost(self) -> None:
        """The lease is gone: see to it that nothing runs in the group, now and later. Does not wait."""
        self._wake.set()

    def interrupt(self) -> None:
        """A signal ends the work of this thread: see to it that nothing runs in the group. Does not wait."""
        self._interrupted = True
        _calmly(self._jobs.hang_up)
        self._wake.set()

    def close(self, error: BaseException | None = None) -> None:
        """End the group. With an error, or if the lease is gone, whatever still runs is cancelled first."""
        if self._closed:
            return
        self._closed = True
        self._ending.set()
        self._wake.set()
        self._watcher.join()
        if error is None and not self._batch.lost:
            stages = _calmly(self._jobs.progress.look)
            if stages is not None and stages.tasks:
                self._batch.say(f"Spark: {stages.summary()} under lease {self._batch.id}")
        _calmly(self._jobs.progress.end)
        if error is not None and not isinstance(error, Exception):
            _calmly(self._jobs.hang_up)
        _calmly(self._jobs.leave)

    def __enter__(self) -> SparkGroup:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close(error)

    def _watch(self) -> None:
        """Follow the stages, and cancel for as long as the lease is lost or the work interrupted. All in a thread of
        its own: the one that works is waiting for Spark, and its connection to the JVM cannot be shared."""
        while not self._ending.is_set():
            lost = self._interrupted or bool(self._batch.lost)
            if lost:
                self._wake.clear()
                self.cancel()
            else:
                stages = _calmly(self._jobs.progress.look)
                if stages is not None and stages.running:
                    self._batch.show("spark", stages.done, stages.tasks, f"Spark: {stages}")
            (self._ending if lost else self._wake).wait(CANCEL_EVERY if lost else LOOK_EVERY)
        self.cancel()  # what a background thread of the body may have left running


def group_name(namespace: str, lease_id: str) -> str:
    """The name of a lease's job group, or tag. A tag may not have a comma."""
    return f"omnirelay/{namespace.replace(',', '_')}/{lease_id}"


def _calmly(call: Callable[[], Any]) -> Any:
    """Call Spark for something that must not fail the work, which may be over because the session is."""
    try:
        return call()
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("py4j", "pyspark", "grpc") or isinstance(error, OSError):
            return None
        raise


@contextmanager
def spark_jobs(batch: LeasedBatch, within_reach: Sequence[Any]) -> Iterator[None]:
    """Run a block with every session that the body can reach in the lease's job group.

    However the block ends, nothing runs in the group when this is over. If it fails because the lease was lost, that
    is what it raises; Spark itself only says that somebody cancelled a job.
    """
    try:
        for session in sessions_among(within_reach):
            batch.spark_group(session)
        yield
    except BaseException as error:
        batch.close_spark_groups(error)
        if isinstance(error, Exception):
            batch.raise_if_lost(error)
        raise
    batch.close_spark_groups()


@contextmanager
def stopped_by_signals(batch: LeasedBatch) -> Iterator[None]:
    """Run a block in which a signal stops the batch's Spark jobs before anything else learns of it.

    Whoever cleans up on the way out may call Spark. On a connection that still waits for the interrupted job, such a
    call would wait too, and the job that it waits for is the one that should end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def stop(number: int, frame: FrameType | None) -> None:
        batch.interrupt_spark_groups()
        before[number](number, frame)

    for each in (signal.SIGINT, signal.SIGTERM):
        if callable(handler := signal.getsignal(each)):
            before[each] = handler
            signal.signal(each, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


__all__ = ["SparkGroup", "Stages", "group_name", "spark_jobs", "stopped_by_signals"]
