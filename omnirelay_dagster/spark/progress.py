"""How far the Spark jobs of a batch are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from pyspark import SparkContext


class Stages(NamedTuple):
    """The stages of a group at one moment: how many there are and were, and their tasks."""

    jobs: int
    stages: int
    tasks: int
    done: int
    running: int
    failed: int
    current: str

    def __str__(self) -> str:
        share = f" ({100 * self.done // self.tasks} %)" if self.tasks else ""
        failed = f", {self.failed} failed and tried again" if self.failed else ""
        where = f" in {self.current}" if self.current else ""
        return f"{self.done} of {self.tasks} tasks{share}, {self.running} running{where}{failed}"

    def summary(self) -> str:
        """What it came to."""
        what = [(self.jobs, "job"), (self.stages, "stage"), (self.done, "task")]
        return ", ".join(f"{n} {name}{'s' if n != 1 else ''}" for n, name in what if n)


class Progress(Protocol):
    """Looks at the jobs of a group."""

    def look(self) -> Stages: ...

    def end(self) -> None: ...


class _Stage(NamedTuple):
    name: str
    tasks: int
    done: int
    running: int
    failed: int


class ContextProgress:
    """Through the status tracker of a SparkContext. Jobs that have ended are not looked at again."""

    def __init__(self, context: SparkContext, group: str) -> None:
        self._tracker = context.statusTracker()
        self._group = group
        self._ended: set[int] = set()
        self._stages: dict[int, _Stage] = {}

    def look(self) -> Stages:
        jobs = set(self._tracker.getJobIdsForGroup(self._group))
        for job in jobs - self._ended:
            info = self._tracker.getJobInfo(job)
            if info is None:
                continue
            for stage in info.stageIds:
                self._look_at(int(stage))
            if info.status in ("SUCCEEDED", "FAILED"):
                self._ended.add(job)
        return _sum(len(jobs | self._ended), list(self._stages.items()))

    def _look_at(self, stage: int) -> None:
        info = self._tracker.getStageInfo(stage)
        if info is not None and info.numCompletedTasks + info.numActiveTasks + info.numFailedTasks:
            self._stages[stage] = _Stage(
                info.name, info.numTasks, info.numCompletedTasks, info.numActiveTasks, info.numFailedTasks
            )

    def end(self) -> None: ...


class ConnectProgress:
    """Through the reports that a Spark Connect server sends while operations run."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._stages: dict[int, _Stage] = {}
        self._operations: set[str] = set()
        session.registerProgressHandler(self._note)

    def _note(self, stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:
        with self._lock:
            self._operations.add(str(operation_id))
            for each in stages or ():
                finished = each.num_completed_tasks >= each.num_tasks
                running = 0 if finished or done else inflight_tasks
                self._stages[each.stage_id] = _Stage("", each.num_tasks, each.num_completed_tasks, running, 0)

    def look(self) -> Stages:
        with self._lock:
            return _sum(len(self._operations), list(self._stages.items()))

    def end(self) -> None:
        self._session.removeProgressHandler(self._note)


def _sum(jobs: int, stages: list[tuple[int, _Stage]]) -> Stages:
    active = [(number, each) for number, each in stages if each.running]
    current = ", ".join(f"stage {number}{f' ({each.name})' if each.name else ''}" for number, each in active[:2])
    return Stages(
        jobs,
        len(stages),
        sum(each.tasks for _, each in stages),
        sum(each.done for _, each in stages),
        sum(each.running for _, each in active),
        sum(each.failed for _, each in stages),
        current,
    )
