"""How much SQLite has to do, in steps of its machine: unlike time, the same on every machine and at every try."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa


@contextmanager
def counted(file: Path) -> Iterator[Callable[[Callable[[], object]], int]]:
    """Within the block: a function that gives how many steps an act takes on connections to ``file`` opened since."""
    steps = [0]

    def step() -> None:
        steps[0] += 1

    def count(connection: sqlite3.Connection, _: object) -> None:
        if str(file) in str(connection.execute("PRAGMA database_list").fetchall()):
            connection.set_progress_handler(step, 1)

    def cost(act: Callable[[], object]) -> int:
        steps[0] = 0
        act()
        return steps[0]

    sa.event.listen(sa.Pool, "connect", count)
    try:
        yield cost
    finally:
        sa.event.remove(sa.Pool, "connect", count)
