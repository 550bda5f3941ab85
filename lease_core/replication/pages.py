"""Reading the log once for many sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial

from lease_core.replication.batch import Batch
from lease_core.replication.contract import EventSource, good_events
from lease_core.replication.errors import HistoryDiffers

logger = logging.getLogger(__name__)

_ASK_THE_TIME_EVERY = 60.0
_PAGES_AHEAD = 4  # a disk takes its time unevenly: with one page ahead either side would often wait for the other
_LARGE = 4 << 20
"""Bytes: a page of so many may be short because its events are large."""


class Pages:
    """The last few pages of the source that were read, so that sinks side by side share one read and one encoding.

    A sink that is far behind reads its own pages, and memory stays bounded by how many are ``kept``. Once the source
    was read to its end it is asked once in ``quiet`` seconds, however many sinks wait: to follow a busy queue more
    closely than that would make many small deliveries of few large ones, at the cost of the queue's own commits.
    ``sealed`` says that sinks want the digests of pages and wait for disks: pages are then read and hashed ahead, by a
    thread that works while they wait. Sinks that rather work than wait would only quarrel with it over the interpreter;
    those among them that know when they wait have the next page read then (``Batch.meanwhile``).
    """

    def __init__(self, source: EventSource, size: int, kept: int, quiet: float, *, sealed: bool = False) -> None:
        self._source = source
        self._payload: Callable[[int, int], tuple[bytes, int]] | None = getattr(source, "event_payload", None)
        self._size = size
        self._sealed = sealed
        self._quiet = quiet
        self._pages: deque[Batch] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._ended: tuple[int, float] = (-1, 0.0)
        self._namespace: str | None = getattr(source, "namespace", None)
        self._origin: str = getattr(source, "queue_id", None) or ""
        self._reader: ThreadPoolExecutor | None = None
        self._ahead: deque[tuple[int, Future[Batch | None]]] = deque()
        self._awaited = -1
        self._offset = (0.0, float("-inf"))
        self._head = (0, float("-inf"))

    def namespace(self) -> str | None:
        """The source's namespace; None as long as it is only to be learnt from the first event, and there is none."""
        if self._namespace is None and (found := self._source.events(0, 1)):
            self._namespace = found[0].namespace
        return self._namespace

    def after(self, number: int, limit: int, *, fill: bool = False) -> Batch | None:
        """The next events above ``number``, ``limit`` of them at most; none if there is nothing new.

        With ``fill`` the source is asked again if the page at hand does not give as many.
        """
        with self._lock:
            rest = self._at_hand(number)
            asked = self._ended[0] == number and time.monotonic() < self._ended[1]
            if asked or (rest is not None and (len(rest) >= limit or not fill)):
                return None if rest is None else rest.head(limit)
            read = self._take(number)
            if read is None or (fill and len(read) < limit):
                self._ended = (number, time.monotonic() + self._quiet)
            if read is None:
                return None
            if self._ends_the_log(read):
                self._ended = (read.last, time.monotonic() + self._quiet)
            self._pages.appendleft(read)
            return read.head(limit)

    def _take(self, number: int) -> Batch | None:
        """The page above ``number``: the one that was read ahead, if it is that, or else read now.

        While a full page is on its way to sinks that wait for disks the next ones are read by a thread, so that reading
        and writing take their time at once rather than in turn.
        """
        if self._ahead and self._ahead[0][0] != number:
            self._let_go_ahead()
        self._awaited = number  # who waits for it can as well hash it, while the next one is read
        read = self._ahead.popleft()[1].result() if self._ahead else None
        if read is None or self._ends_the_log(read):  # there may be more by now
            self._let_go_ahead()
            read = self._read(number)
        if self._sealed and read is not None and len(read) == self._size:
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="relay-read-ahead")
            while len(self._ahead) < _PAGES_AHEAD:
                place = read.last + self._size * len(self._ahead)
                before = self._ahead[-1][1] if self._ahead else None
                self._ahead.append((place, self._reader.submit(self._read_on, place, before)))
        return read

    def _read_meanwhile(self, number: int) -> None:
        """Have the page above ``number`` at hand, if it is full: there may be more of another by the time it is needed.

        Raises nothing, and waits for no other sink's reading: what is not read here is read when it is asked for.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            page = self._read(number) if self._at_hand(number) is None else None
            if page is not None and len(page) == self._size:
                self._pages.appendleft(page)
        except Exception as error:
            logger.debug("the page after %d could not be read meanwhile: %s", number, error)
        finally:
            self._lock.release()

    def _read_on(self, number: int, before: Future[Batch | None] | None) -> Batch | None:
        """The page above ``number``, unless the one before it, which this thread has read, ends the log."""
        page = None if before is None else before.result()
        return self._read(number) if before is None or (page is not None and page.last == number) else None

    def is_ready(self, number: int) -> bool:
        """Whether the page above ``number`` is here, so that nobody would wait for it."""
        with self._lock:
            if self._at_hand(number) is not None:
                return True
            if not self._ahead or self._ahead[0][0] != number or not self._ahead[0][1].done():
                return False
            page = self._ahead[0][1]
            return page.exception() is None and page.result() is not None

    def close(self) -> None:
        """Let go of the thread that reads ahead; it comes back when it is needed."""
        with self._lock:
            reader, self._reader = self._reader, None
            self._let_go_ahead()
        if reader is not None:
            reader.shutdown(wait=True)

    def _let_go_ahead(self) -> None:
        """Read no more of what nobody waits for: sinks far apart would pile it up before what the next one needs."""
        for _, page in self._ahead:
            page.cancel()
        self._ahead.clear()

    def wake(self) -> None:
        """Ask the source at the next call, even if it had nothing a moment ago."""
        with self._lock:
            self._ended = (-1, 0.0)

    def _ends_the_log(self, page: Batch) -> bool:
        return len(page) < self._size and (self._payload is None or len(page.payload) < _LARGE)

    def _at_hand(self, number: int) -> Batch | None:
        for page in self._pages:
            if page.first <= number + 1 <= page.last:
                return page.after(number)
        return None

    def _read(self, number: int) -> Batch | None:
        page = self._read_page(number)
        if page is not None:
            page.origin = self._origin
            if not self._sealed and len(page) == self._size:
                page.meanwhile = partial(self._read_meanwhile, page.last)
        return page

    def _read_page(self, number: int) -> Batch | None:
        if self._payload is not None and (namespace := self.namespace()) is not None:
            payload, count = self._payload(number, self._size)
            if not count:
                return None
            page = Batch.of_payload(namespace, number + 1, payload, count)
            if self._sealed and number != self._awaited:
                page.digest  # noqa: B018  made here, it costs those who wait for the disk nothing
            return page
        events = good_events(self._source, number, self._size)
        if not events:
            return None
        page = Batch(events)
        if page.first != number + 1 or page.last != number + len(page):
            raise HistoryDiffers(f"events are missing in the source after {number}: verify it before copying it")
        return page

    def head(self, *, fresh: bool = False) -> int | None:
        """The number of the last event, as of a moment ago unless ``fresh``, from a source that can tell."""
        stats = getattr(self._source, "stats", None)
        if stats is None:
            return None
        with self._lock:
            if fresh or time.monotonic() >= self._head[1]:
                self._head = (int(stats().head), time.monotonic() + max(self._quiet, 0.2))
            return self._head[0]

    def now(self) -> datetime:
        """The time by the clock that stamps the events, asked for once in a while."""
        ask = getattr(self._source, "now", None)
        if ask is not None and time.monotonic() >= self._offset[1]:
            self._offset = (ask().timestamp() - time.time(), time.monotonic() + _ASK_THE_TIME_EVERY)
        return datetime.fromtimestamp(time.time() + self._offset[0], UTC)
