"""What every contender does, so that the measuring code knows none of them by name."""

from __future__ import annotations

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Store = Literal["sqlite", "postgres"]
Role = Literal["ours", "raw", "peer"]
Operation = Literal["enqueue", "lease", "complete"]

LEASE_SECONDS = 600  # longer than any run: nothing expires while it is being measured
BUSY_SECONDS = 60  # how long a SQLite writer waits for another one


class Item(NamedTuple):
    """The same small piece of work for everybody: an id of about 40 characters, a body of about 100 bytes."""

    resource_id: str
    body: bytes


def make_items(source: str, count: int) -> list[Item]:
    body = '{"source":"%s","row":%d,"etag":"9e107d9d372bb6826bd81d3542a419d6","size":1048576,"kind":"parquet"}'
    return [
        Item(f"s3://raw/{source}/2026/part-{row:010d}.parquet", (body % (source, row)).encode()) for row in range(count)
    ]


class Contender(ABC):
    """One queue, opened by one worker process.

    `lease` claims at least once wherever the queue can; `complete` is its own way to be done with an item.
    Turning an `Item` into the queue's own message is part of the work, and so is turning it back.
    """

    name: ClassVar[str]
    store: ClassVar[Store]
    role: ClassVar[Role]
    packages: ClassVar[tuple[str, ...]] = ()
    batched: ClassVar[frozenset[Operation]] = frozenset(("enqueue", "lease", "complete"))
    many_processes: ClassVar[bool] = True
    completes: ClassVar[bool] = True  # False when leasing already removed the item
    note: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def prepare(cls, target: str) -> None:
        """Create what the queue needs in a fresh database: a path for SQLite, a URL for PostgreSQL."""

    @abstractmethod
    def __init__(self, target: str, worker: str) -> None: ...

    @abstractmethod
    def enqueue(self, items: Sequence[Item]) -> None: ...

    @abstractmethod
    def lease(self, limit: int) -> Sequence[Any]: ...

    @abstractmethod
    def complete(self, leases: Sequence[Any]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class AsyncContender(Contender):
    """Lends an event loop to the queues that only speak async; the loop itself costs some 20 us a call."""

    def __init__(self, target: str, worker: str) -> None:
        try:
            loops = importlib.import_module("uvloop")
        except ImportError:
            loops = asyncio
        self._loop: asyncio.AbstractEventLoop = loops.new_event_loop()

    def wait(self, work: Awaitable[T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.wait(self.aclose())
        self._loop.close()

    @abstractmethod
    async def aclose(self) -> None: ...
