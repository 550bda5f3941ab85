"""The measurements. Everything timed runs in worker processes; the parent only starts them and adds up.

Workers are forked from a server process that has already imported every contender, so that eight of them
start in a fraction of a second and none pays for imports while the clock runs.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, Literal

import psutil

from benchmarks.contenders import MODULES, load, module_of
from benchmarks.contenders.contract import Contender, Item, make_items

Report = Callable[[int], None]
Measured = Literal["cycle", "enqueue", "lease", "complete"]
OPERATIONS: tuple[Measured, ...] = ("cycle", "enqueue", "lease", "complete")
SOURCE_ITEMS = 20_000
STREAM_CALL = 1_000
PATIENCE = 120.0  # seconds after which a silent worker is taken for dead

_processes = multiprocessing.get_context("forkserver")


def preload() -> None:
    _processes.set_forkserver_preload([__name__, *{module_of(name) for name in MODULES}])


class WorkerFailed(RuntimeError):
    """A worker raised, or hung."""


@dataclass(frozen=True)
class Pace:
    """How long one cell runs: unmeasured at first, then the whole cycle, then each operation alone.

    A database that has just been made is slow for a moment: its files grow with every commit until the first
    checkpoint lets it use them again.
    """

    warm: float
    cycle: float
    operation: float


# --- throughput ---------------------------------------------------------------------------------------------


def throughput(contender: str, target: str, batch: int, workers: int, pace: Pace) -> dict[Measured, float]:
    """Items per second of each operation, with all workers on one database at the same time."""
    barrier = _processes.Barrier(workers)
    crew = [_start(_work, contender, target, f"w{n}", batch, pace, barrier) for n in range(workers)]
    spans = _results(crew)
    rates: dict[Measured, float] = {}
    for operation in OPERATIONS:
        started, ended, items = zip(*(span[operation] for span in spans), strict=True)
        rates[operation] = sum(items) / max(max(ended) - min(started), 1e-9)
    return rates


def _work(
    _report: Report, contender: str, target: str, worker: str, batch: int, pace: Pace, barrier: Barrier
) -> dict[Measured, tuple[float, float, int]]:
    try:
        queue = load(contender)(target, worker)
        bench = _Bench(queue, batch, worker)
        barrier.wait(PATIENCE)
        bench.cycle(pace.warm)
        spans: dict[Measured, tuple[float, float, int]] = {}
        for operation in OPERATIONS:
            seconds = pace.cycle if operation == "cycle" else pace.operation
            barrier.wait(PATIENCE)
            started = time.perf_counter()
            items = getattr(bench, operation)(seconds)
            spans[operation] = (started, time.perf_counter(), items)
        barrier.wait(PATIENCE)
        queue.close()
        return spans
    except BaseException:
        barrier.abort()
        raise


@dataclass
class _Bench:
    """One worker's loops. Each runs for about the given time, at least once, and returns the items moved."""

    queue: Contender
    batch: int
    worker: str
    _leased: deque[Sequence[Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._batches = _rotate(make_items(self.worker, max(SOURCE_ITEMS, self.batch)), self.batch)

    def cycle(self, seconds: float) -> int:
        def once() -> int:
            self.queue.enqueue(next(self._batches))
            left = self.batch
            given_up = time.perf_counter() + PATIENCE / 4
            while left:  # as much was enqueued as is leased, so what another worker took is made up for
                if leases := self.queue.lease(left):
                    self.queue.complete(leases)
                    left -= len(leases)
                elif time.perf_counter() > given_up:
                    raise WorkerFailed(f"{left} items that were enqueued cannot be leased")
            return self.batch

        return _repeat(once, seconds)

    def enqueue(self, seconds: float) -> int:
        def once() -> int:
            self.queue.enqueue(next(self._batches))
            return self.batch

        return _repeat(once, seconds)

    def lease(self, seconds: float) -> int:
        limit = self.batch if "lease" in self.queue.batched else 1

        def once() -> int:
            leases = self.queue.lease(limit)
            if leases:
                self._leased.append(leases)
            return len(leases)

        return _repeat(once, seconds)

    def complete(self, seconds: float) -> int:
        def once() -> int:
            if not self._leased:
                return 0
            leases = self._leased.popleft()
            self.queue.complete(leases)
            return len(leases)

        return _repeat(once, seconds)


def _repeat(once: Callable[[], int], seconds: float) -> int:
    """Call until the time is up or there is nothing left to move."""
    deadline = time.perf_counter() + seconds
    moved = last = once()
    while last and time.perf_counter() < deadline:
        moved += (last := once())
    return moved


def _rotate(items: Sequence[Item], batch: int) -> Iterator[Sequence[Item]]:
    """Batches of made-up items for ever, at no cost to the loop that is being timed."""
    while True:
        for start in range(0, len(items) - batch + 1, batch):
            yield items[start : start + batch]


# --- streaming in: memory -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    items: int
    seconds: float
    growth_mib: float  # of resident memory, highest seen against what it was before the first call
    resident_mib: float


def stream(contender: str, target: str, items: int, report: Report) -> Streamed:
    """Fill a queue in calls of a thousand from a process of its own, watching what that process occupies."""
    streamed: Streamed
    (streamed,) = _results([_start(_stream, contender, target, items)], report)
    return streamed


def _stream(report: Report, contender: str, target: str, items: int) -> Streamed:
    queue = load(contender)(target, "filler")
    batches = _rotate(make_items("filler", SOURCE_ITEMS), STREAM_CALL)
    process = psutil.Process()
    before = peak = process.memory_info().rss
    started = time.perf_counter()
    for call in range(items // STREAM_CALL):
        queue.enqueue(next(batches))
        if call % 10 == 9:
            peak = max(peak, process.memory_info().rss)
            report(10 * STREAM_CALL)
    seconds = time.perf_counter() - started
    queue.close()
    return Streamed(items, seconds, (peak - before) / 2**20, peak / 2**20)


# --- lease latency ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latency:
    p50_ms: float
    p99_ms: float
    calls: int


def latencies(filled: Sequence[tuple[str, str]], limit: int, calls: int, block: int) -> list[Latency]:
    """How long one lease call takes in each of several filled queues, which take turns to share the noise.

    After each call, off the clock, what was leased is completed and replaced: the depth stays as it was.
    """
    measured: list[Latency]
    (measured,) = _results([_start(_latencies, filled, limit, calls, block)])
    return measured


def _latencies(_report: Report, filled: Sequence[tuple[str, str]], limit: int, calls: int, block: int) -> list[Latency]:
    queues = [load(contender)(target, "reader") for contender, target in filled]
    batches = _rotate(make_items("reader", SOURCE_ITEMS), limit)
    times: list[list[float]] = [[] for _ in queues]
    for turn in range(1 + calls // block):
        for queue, taken in zip(queues, times, strict=True):
            for _ in range(block):
                started = time.perf_counter()
                leases = queue.lease(limit)
                taken.append(time.perf_counter() - started)
                assert len(leases) == limit
                queue.complete(leases)
                queue.enqueue(next(batches))
            if turn == 0:
                taken.clear()  # the first turn warms connections, plans and caches
    for queue in queues:
        queue.close()
    return [Latency(_percentile(taken, 0.50), _percentile(taken, 0.99), len(taken)) for taken in times]


def _percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))] * 1e3


# --- processes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Worker:
    process: Any
    inbox: Connection


def _start(work: Callable[..., Any], *arguments: Any) -> _Worker:
    inbox, outbox = _processes.Pipe(duplex=False)
    process = _processes.Process(target=_run, args=(outbox, work, arguments), daemon=True)
    process.start()
    outbox.close()
    return _Worker(process, inbox)


def _run(outbox: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        outbox.send(("done", work(lambda moved: outbox.send(("progress", moved)), *arguments)))
    except threading.BrokenBarrierError:
        outbox.send(("stopped", "another worker failed"))
    except BaseException as error:
        outbox.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))


def _results(crew: Sequence[_Worker], report: Report = lambda moved: None) -> list[Any]:
    """What every worker returned. When any failed: the failure that came first, not those it caused."""
    outcomes = [_outcome(worker, report) for worker in crew]
    for kind in ("failed", "stopped"):
        for found, value in outcomes:
            if found == kind:
                raise WorkerFailed(value)
    return [value for _, value in outcomes]


def _outcome(worker: _Worker, report: Report) -> tuple[str, Any]:
    try:
        while worker.inbox.poll(PATIENCE):
            kind, value = worker.inbox.recv()
            if kind != "progress":
                return kind, value
            report(value)
        return "failed", f"no answer for {PATIENCE:.0f} s"
    except EOFError:
        return "failed", "the worker process died"
    finally:
        worker.inbox.close()
        worker.process.join(5)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
