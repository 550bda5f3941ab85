"""The relay: from one log to many sinks, each at its own pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, get_args

from lease_core.errors import InvalidInput
from lease_core.replication.contract import Checkpoints, EventSource, HoldsPosition, Sink
from lease_core.replication.lane import Lane, OnRefusal, Rules, SinkStatus, Start, Step
from lease_core.replication.pages import Pages
from lease_core.replication.refused import RefusedEvents
from lease_core.replication.telemetry import Telemetry


class Relay:
    """Delivers the events of ``queue`` to every sink: in order, in batches, at least once.

    Each sink has a thread, a checkpoint, retries and failures of its own; one that is down delays neither the others
    nor the queue, and catches up later. Checkpoints are kept in the queue, which then does not prune what a sink has
    yet to see; a sink that stores its own position together with the events never gets one twice.

    ``start`` and ``stop`` run it in the background, as does ``with Relay(...)``; ``run_once`` does what there is to do
    and returns. ``rules`` has a sink's own ``Rules`` by its name. ``refused`` is where events go that a sink refused
    for good, if its rule is to skip them. ``checkpoints`` is for a source that keeps none.
    """

    def __init__(
        self,
        queue: EventSource,
        sinks: Sink | Iterable[Sink],
        *,
        rules: Rules | Mapping[str, Rules] | None = None,
        interval: float = 0.25,
        refused: RefusedEvents | None = None,
        checkpoints: Checkpoints | None = None,
        meter: Any = None,
    ) -> None:
        listed = [sinks] if isinstance(sinks, Sink) else list(sinks)
        _check_sinks(listed)
        by_name = _rules_by_name(rules, [sink.name for sink in listed])
        check_rules(by_name, refused is not None, interval)
        kept = checkpoints or (queue if isinstance(queue, Checkpoints) else None)
        if kept is None and not all(isinstance(sink, HoldsPosition) for sink in listed):
            raise InvalidInput(
                "checkpoints", "this source keeps none: pass FileCheckpoints(path) or MemoryCheckpoints()"
            )
        size = max(each.batch_size for each in by_name.values())
        sealed = any(getattr(sink, "sealed", False) for sink in listed)
        # for each sink the page that it is at and the one after it
        self._pages = pages = Pages(queue, size, 2 * len(listed), interval, sealed=sealed)
        telemetry = Telemetry(meter)
        self._interval = interval
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._working = threading.Lock()
        self._lanes = [
            Lane(sink, pages, kept, by_name[sink.name], refused, telemetry, self._stop.is_set) for sink in listed
        ]

    # In the background

    def start(self) -> Relay:
        """Begin delivering in background threads. The relay is then stopped by ``stop``."""
        if not self._working.acquire(blocking=False):
            raise InvalidInput("relay", "it is running already")
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"relay-{lane.sink.name}", daemon=True)
            for lane in self._lanes
        ]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self, timeout: float | None = 30.0) -> bool:
        """Let every sink finish its batch, keep the checkpoints and close the sinks.

        Gives whether all of them came to an end in time; one that did not is left behind in its daemon thread.
        """
        self._stop.set()
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        busy = {thread.name for thread in self._threads if thread.is_alive()}
        for lane in self._lanes:
            if f"relay-{lane.sink.name}" not in busy:
                lane.close()
        if ended:
            self._pages.close()
        if self._threads and ended:
            self._threads = []
            self._working.release()
        return ended

    @property
    def running(self) -> bool:
        """Whether any sink is being served in the background: not before ``start``, nor once all have stopped."""
        return any(thread.is_alive() for thread in self._threads)

    def __enter__(self) -> Relay:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _run(self, lane: Lane) -> None:
        while not self._stop.is_set():
            match lane.step():
                case Step.STOPPED:
                    return
                case Step.IDLE:
                    self._stop.wait(self._interval)
                case Step.WAITING:
                    self._stop.wait(min(lane.wait, 60.0))
                case Step.DELIVERED:
                    pass

    # In the foreground

    def run_once(self, max_batches: int = 100, *, max_seconds: float | None = None) -> list[SinkStatus]:
        """Deliver up to ``max_batches`` to each sink and come back, sooner if there is nothing left to deliver.

        A sink that fails is not waited for: it is tried again by the next call, once its pause is over.
        """
        if max_batches < 1:
            raise InvalidInput("max_batches", f"must be at least 1 (got {max_batches})")
        if not self._working.acquire(blocking=False):
            raise InvalidInput("relay", "it is running already; stop it before run_once")
        self._stop.clear()
        self._pages.wake()
        try:
            deadline = None if max_seconds is None else time.monotonic() + max_seconds
            with ThreadPoolExecutor(len(self._lanes), thread_name_prefix="relay") as pool:
                list(pool.map(lambda lane: _run_some(lane, max_batches, deadline), self._lanes))
        finally:
            self._pages.close()
            self._working.release()
        return self.status()

    def status(self) -> list[SinkStatus]:
        """Where each sink stands."""
        return [lane.status() for lane in self._lanes]

    def wait_until(self, number: int, timeout: float) -> bool:
        """Wait until every sink that is not stopped has come to event ``number``; False if it took too long."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if all(each.state == "stopped" or (each.position or 0) >= number for each in self.status()):
                return True
            time.sleep(min(0.02, self._interval))
        return False


def _run_some(lane: Lane, max_batches: int, deadline: float | None) -> None:
    for _ in range(max_batches):
        if lane.step() is not Step.DELIVERED or (deadline is not None and time.monotonic() >= deadline):
            break
    lane.rest()


def _check_sinks(sinks: list[Sink]) -> None:
    if not sinks:
        raise InvalidInput("sinks", "give at least one")
    for sink in sinks:
        if not isinstance(sink, Sink) or not sink.name:
            raise InvalidInput("sinks", f"a sink has a name and a method deliver(batch), and {sink!r} has not")
    names = [sink.name for sink in sinks]
    if twice := {name for name in names if names.count(name) > 1}:
        raise InvalidInput(
            "sinks", f"two have the name {twice.pop()!r}, under which the checkpoint is kept: pass name="
        )


def _rules_by_name(rules: Rules | Mapping[str, Rules] | None, names: list[str]) -> dict[str, Rules]:
    """The rules of each sink. Those of a sink that is not there are refused: they were meant for one that is."""
    if isinstance(rules, Rules):
        return dict.fromkeys(names, rules)
    given = dict(rules or {})
    if unknown := [name for name in given if name not in names]:
        raise InvalidInput("rules", f"there is no sink {unknown[0]!r}; there are {', '.join(names)}")
    return {name: given.get(name, Rules()) for name in names}


def check_rules(rules: Mapping[str, Rules], records_refused: bool, interval: float) -> None:
    """Refuse rules that a relay cannot serve its sinks by."""
    if interval <= 0:
        raise InvalidInput("interval", f"must be above 0 seconds (got {interval})")
    for name, each in rules.items():
        if each.batch_size < 1:
            raise InvalidInput("batch_size", f"must be at least 1 (got {each.batch_size} for {name})")
        if each.on_refusal not in get_args(OnRefusal):
            raise InvalidInput("on_refusal", _one_of(OnRefusal, each.on_refusal, name))
        if each.start not in get_args(Start):
            raise InvalidInput("start", _one_of(Start, each.start, name))
        if each.on_refusal == "skip" and not records_refused:
            raise InvalidInput("refused", f"sink {name} is to skip what it refuses: say where that is recorded")


def _one_of(kind: Any, got: object, name: str) -> str:
    return f"must be one of {', '.join(get_args(kind))} (got {got!r} for {name})"
