"""Progress bars that follow the queue's log; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lease_core import LeaseQueue

PERIOD = 0.05
AT_THE_MOST = 120.0


class Bars:
    """One bar for all orders, and one a worker. The log, read from a cursor, says what each has completed."""

    def __init__(self, console: Console, queue: LeaseQueue, orders: int, workers: Sequence[str]) -> None:
        columns = TextColumn("{task.description:>10}"), BarColumn(50), MofNCompleteColumn()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._console = console
        self._queue = queue
        self._orders = orders
        self._cursor = self._done = 0
        self._all = {kind: self._progress.add_task(kind, total=orders) for kind in ("Enqueued", "Completed")}
        self._each = {name: self._progress.add_task(name, total=orders) for name in workers}

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(f"[bold]*[/] {text}", highlight=False)

    def follow(self) -> None:
        """Read on in the log."""
        while events := self._queue.events(after=self._cursor, limit=5_000):
            self._cursor = events[-1].sequence_number
            for event in events:
                if event.type in self._all:
                    self._progress.advance(self._all[event.type])
                if event.type == "Completed" and event.peer_id in self._each:
                    self._progress.advance(self._each[event.peer_id])
                    self._count_one()

    def follow_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + AT_THE_MOST
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError("the workers do not get on")
            self.follow()
            time.sleep(PERIOD)
        self.follow()

    def _count_one(self) -> None:
        self._done += 1
        if not self._console.is_terminal and self._done % (self._orders // 4) == 0:
            self._console.print(f"  {self._done:,} of {self._orders:,} completed", highlight=False)
