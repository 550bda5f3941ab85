"""What the queue asks of a database: one locked transaction per operation, and plain reads.

SQLAlchemy provides engine, pool, dialect and schema. The statements themselves are SQL run through the driver's own
cursors: at one item a call the cost of building statements would otherwise exceed the database's.

SQL here is written with ``?`` marks; each store gives them its driver's form. Values are always bound.
"""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import sqlalchemy as sa

from lease_core.config import QueueConfig
from lease_core.errors import LeaseError, QueueClosed, StoreError, StoreUnavailable

_AT_HAND = 8

T = TypeVar("T")
Row = tuple[Any, ...]
Clock = Callable[[], float]
Probe = Callable[[str], None]


class Query(NamedTuple):
    sql: str
    params: Sequence[Any] = ()


class Write(NamedTuple):
    """A statement to run at commit. ``expect``: how many rows it must touch, or the transaction is given up.

    All but those that come ``last`` touch different rows and may run in any order, or as one.
    """

    sql: str
    params: Sequence[Any] = ()
    expect: int | None = None
    last: bool = False


class Head(msgspec.Struct):
    """The namespace's row: its counters, its rules, and the number of the last event.

    No delayed item is due before ``next_due`` and no lease ends before ``next_expiry``, so that until then nobody
    has to look for any. A negative ``epoch`` seals the namespace: this copy follows another, or another has taken over.
    """

    ns: int
    namespace: str
    queue_id: str
    epoch: int
    next_id: int
    number: int
    pruned: int
    pending: int
    active: int
    dead: int
    completed: int
    backpressure: int
    high_mark: int | None
    low_mark: int | None
    capacity: int | None
    exclusive: str | None
    next_due: int | None
    next_expiry: int | None
    lease_wait_until: int
    enqueue_wait_until: int


HEAD_COLUMNS = ", ".join(Head.__struct_fields__)


class ConnectionLost(Exception):
    """The connection died before the commit was sent: nothing happened, and running again is safe."""


class CommitInDoubt(Exception):
    """The connection died while the commit was on its way: only the database knows whether it happened."""

    def __init__(self, number: int, nonce: int) -> None:
        super().__init__(number, nonce)
        self.number = number
        self.nonce = nonce


class SpanMoved(Exception):
    """A row was not as it had been read under the lock. Somebody changed the tables by hand; start over."""


class Transaction(ABC):
    """One operation's grip on a namespace. ``head`` and ``now`` are there after the first ``fetch``.

    Writes are gathered and sent together by ``commit``. Leaving the ``with`` block without it rolls back.
    """

    head: Head
    now: int

    def __init__(self, ns: int) -> None:
        self.ns = ns
        self.writes: list[Write] = []
        self.items: list[Row] = []

    @abstractmethod
    def __enter__(self) -> Transaction: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def fetch(self, *queries: Query) -> list[list[Row]]:
        """Run queries, in one round trip if possible; the first call also begins and takes the lock."""

    def write(self, sql: str, params: Sequence[Any] = (), expect: int | None = None, last: bool = False) -> None:
        self.writes.append(Write(sql, params, expect, last))

    def insert_items(self, rows: list[Row]) -> None:
        self.items.extend(rows)

    @abstractmethod
    def log(self, first: int, last: int, document: bytes, at: int) -> None:
        """Append a log row of time ``at``, with a mark that tells this transaction if its commit is in doubt."""

    @abstractmethod
    def notify(self) -> None:
        """Wake whoever waits for work or room, if and when this transaction commits."""

    @abstractmethod
    def commit(self) -> None:
        """Send what was gathered and make it last. With nothing to write there is nothing to do."""


class Bell(Protocol):
    """Tells waiters that something may have changed, without keeping the database busy."""

    def listen(self) -> Any:
        """A mark to compare with later. Take it before looking at the queue, so that no change slips through."""

    def wait(self, mark: Any, seconds: float) -> None:
        """Return when something changed since ``mark``, or after ``seconds``; sometimes earlier for no reason."""

    def close(self) -> None: ...


class Store(ABC):
    """A database with the schema in it. Safe to share between threads, and usable in a forked child."""

    guard: AbstractContextManager[Any] = nullcontext()  # held by this process's writers, one at a time
    member: str  # SQL: "is one of the values bound here"
    lateral: bool  # whether one statement can look up many ranges (unnest and LATERAL)
    registers_waiters: bool  # whether sleepers must leave a note in the head row to be woken

    def __init__(self, url: sa.URL, config: QueueConfig, clock: Clock | None) -> None:
        self.url = url
        self.config = config
        self.clock = clock
        self.probe: Probe | None = None
        self.closed = False
        self._pid = os.getpid()
        self._at_hand: list[Any] = []
        self.engine = self._engine()

    @abstractmethod
    def _engine(self) -> sa.Engine: ...

    def take(self) -> Any:
        """A connection of the pool. The few last used are kept at hand: going through the pool takes longer than
        some statements do."""
        try:
            return self._at_hand.pop()
        except IndexError:
            return self.engine.raw_connection()

    def put_back(self, pooled: Any) -> None:
        """Give a connection back that is fit for use by others."""
        if self.closed or len(self._at_hand) >= _AT_HAND:
            pooled.close()
        else:
            self._at_hand.append(pooled)

    def _put_down(self) -> None:
        while self._at_hand:
            self._at_hand.pop().close()

    @abstractmethod
    def pack(self, values: Sequence[Any]) -> Any:
        """A list of values as one parameter for ``member``."""

    @abstractmethod
    def translated(self, error: Exception) -> LeaseError:
        """The driver's error as one of ours, with what to do about it."""

    @abstractmethod
    def begin(self, ns: int) -> Transaction:
        """A new transaction object for one run of ``work``."""

    @abstractmethod
    def joined(self, ns: int, connection: Any) -> Transaction:
        """A transaction object that writes inside of the caller's own transaction."""

    @abstractmethod
    def read(self, *queries: Query) -> list[list[Row]]:
        """Run queries outside of any lock."""

    @abstractmethod
    def create_namespace(self, namespace: str, queue_id: str) -> None:
        """Make the namespace's head row, unless somebody just did."""

    @abstractmethod
    def read_now(self) -> int:
        """The time, in epoch microseconds, by the clock this queue goes by."""

    @abstractmethod
    def bell(self, ns: int) -> Bell: ...

    def run(self, ns: int, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` in a locked transaction and commit it, again if the connection dies, for a limited time.

        ``work`` may be called more than once and must have no effect of its own.
        """
        self.check_usable()
        deadline = time.monotonic() + self.config.store_timeout
        pause = 0.02
        doubt: CommitInDoubt | None = None
        results: list[T] = []
        while True:
            try:
                if doubt is not None:
                    if self._settled(ns, doubt):
                        return results[-1]
                    doubt = None
                with self.guard, self.begin(ns) as transaction:
                    results.append(work(transaction))
                    transaction.commit()
                return results[-1]
            except CommitInDoubt as lost:
                doubt, cause = lost, lost.__cause__
            except ConnectionLost as lost:
                cause = lost.__cause__
            except SpanMoved as moved:
                cause = moved
            except StoreError as error:
                if doubt is None:
                    raise
                cause = error.__cause__ or error  # what became of the commit is still not known
            if time.monotonic() + pause > deadline:
                raise StoreUnavailable(_gave_up(cause, doubt, self.config.store_timeout)) from cause
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, 0.5)

    def _settled(self, ns: int, doubt: CommitInDoubt) -> bool:
        """Whether the commit in doubt happened. The lock makes a commit still under way finish first."""
        with self.guard, self.begin(ns) as transaction:
            [rows] = transaction.fetch(
                Query("SELECT nonce FROM omnirelay_log WHERE ns = ? AND last = ?", (ns, doubt.number))
            )
        return bool(rows) and rows[0][0] == doubt.nonce

    def patiently(self, act: Callable[[], T]) -> T:
        """Do ``act``, again and again where another process may be in the way for a moment."""
        return act()

    def check_usable(self) -> None:
        if self.closed:
            raise QueueClosed("this queue was closed; open it again with LeaseQueue.open")
        if os.getpid() != self._pid:
            self.after_fork()
            self._pid = os.getpid()

    def after_fork(self) -> None:
        """Leave the parent's connections to the parent and start with none."""
        self._inherited = self._at_hand  # never let go of, or the parent's sessions would end with them
        self._at_hand = []
        self.engine.dispose(close=False)

    def reach(self, point: str) -> None:
        """A named point in an operation's life, where tests crash, pause or watch."""
        if self.probe is not None:
            self.probe(point)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if os.getpid() == self._pid:
                self._put_down()
            self.engine.dispose(close=os.getpid() == self._pid)


def _gave_up(cause: BaseException | None, doubt: CommitInDoubt | None, seconds: float) -> str:
    unsure = (
        " Its last commit got no answer: repeating an enqueue is only safe for items with a request_id."
        if doubt
        else " Nothing was written; repeat the call when it is back."
    )
    return f"the database could not be reached for {seconds:g} s ({cause}).{unsure}"
