"""Events to NATS JetStream, a message an event."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping
from typing import Any

from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.codec import decode_event
from lease_core.replication.errors import HistoryDiffers, RefusedForGood, SinkUnavailable
from lease_core.replication.same_event import check_last
from lease_core.replication.sinks.event_loop import EventLoop

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MESSAGE_ID = "Nats-Msg-Id"
_FOLLOWS = "Nats-Expected-Last-Msg-Id"


class NatsSink:
    """Publishes each event to ``<subject>.<namespace>`` in a stream that has this namespace only.

    The message id is the namespace and the event's number, by which the server drops what it has already; each message
    also says which one it must follow, so that messages under way at once are stored in order or not at all. Where to
    go on is read from the last message in the stream, and a log that has another event there is not appended to it. The
    stream, ``<stream>_<namespace>``, is made when it is missing; make it yourself to choose its replicas and limits.
    ``options`` go to ``nats.connect`` (credentials, TLS).
    """

    compares = True

    def __init__(
        self,
        servers: str | list[str],
        name: str = "nats",
        *,
        stream: str = "OMNIRELAY",
        subject: str = "omnirelay.events",
        timeout: float = 30.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._servers = servers
        self._stream, self._subject, self._timeout = stream, subject, timeout
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._loop: EventLoop | None = None
        self._connection: Any = None
        self._ends: dict[str, int] = {}  # the last message of each stream, as far as is known

    def deliver(self, batch: Batch) -> None:
        with self._lock:
            if batch.namespace not in self._ends:
                self._run(self._find_end(batch.namespace))
            check_last(
                batch, self._ends[batch.namespace], lambda number: self._run(self._event(batch.namespace, number))
            )
            rest = batch.after(self._ends[batch.namespace])
            if rest is None:
                return
            try:
                self._run(self._publish(rest))
            except BaseException:
                self._ends.pop(batch.namespace, None)  # some of it may be there
                raise
            self._ends[batch.namespace] = rest.last

    def position(self, namespace: str) -> int | None:
        with self._lock:
            found: int | None = self._run(self._find_end(namespace))
            return found

    def close(self) -> None:
        with self._lock:
            if self._loop is None:
                return
            if self._connection is not None:
                self._loop.run(self._connection.close(), self._timeout)
            self._loop.close()
            self._loop = self._connection = None
            self._ends.clear()

    def _run(self, work: Any) -> Any:
        if self._loop is None:
            self._loop = EventLoop(f"relay-{self.name}")
        nats = _nats()
        try:
            return self._loop.run(work, self._timeout)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise SinkUnavailable(f"NATS: {type(error).__name__} {str(error)[:200]}".rstrip()) from None

    async def _jetstream(self) -> Any:
        nats = _nats()
        if self._connection is None or self._connection.is_closed:
            self._connection = await nats.connect(
                self._servers, max_reconnect_attempts=1, error_cb=_quiet, **self._options
            )
        return self._connection.jetstream(timeout=self._timeout, publish_async_max_pending=4_000)

    async def _find_end(self, namespace: str) -> int | None:
        """The number of the last event in the stream, which is made if it is missing; None if all have aged out."""
        errors = _nats().js.errors
        jetstream = await self._jetstream()
        stream, subject = self._names(namespace)
        try:
            had = (await jetstream.stream_info(stream)).state.last_seq
        except errors.NotFoundError:
            await jetstream.add_stream(name=stream, subjects=[subject], duplicate_window=120)
            had = 0
        try:
            last = await jetstream.get_last_msg(stream, subject)
        except errors.NotFoundError:
            self._ends[namespace] = 0
            return None if had else 0
        self._ends[namespace] = _number(namespace, (last.headers or {}).get(_MESSAGE_ID, ""))
        return self._ends[namespace]

    async def _event(self, namespace: str, number: int) -> LeaseEvent | None:
        """The last event in the stream, if it is that one still: another relay may have gone on, or it has aged out."""
        jetstream = await self._jetstream()
        try:
            last = await jetstream.get_last_msg(*self._names(namespace))
        except _nats().js.errors.NotFoundError:
            return None
        found = decode_event(last.data or b"")
        return found if found.sequence_number == number else None

    async def _publish(self, batch: Batch) -> None:
        jetstream = await self._jetstream()
        stream, subject = self._names(batch.namespace)
        before = self._ends[batch.namespace]
        under_way = []
        for number, line in zip(batch.numbers, batch.lines, strict=True):
            headers = {_MESSAGE_ID: f"{batch.namespace}:{number}", "Nats-Expected-Stream": stream}
            if before:
                headers[_FOLLOWS] = f"{batch.namespace}:{before}"
            try:
                under_way.append(await jetstream.publish_async(subject, line.encode(), headers=headers))
            except _nats().errors.MaxPayloadError:
                await asyncio.gather(*under_way)
                raise RefusedForGood("it is larger than the server takes (max_payload)", number) from None
            if not before:  # nothing says what the first one follows: whether it was stored is known before others are
                await self._await_stored(under_way, batch.namespace, number)
            before = number
        await self._await_stored(under_way, batch.namespace, batch.last)

    async def _await_stored(self, under_way: list[Any], namespace: str, last: int) -> None:
        """Wait for the answers. The server drops for a while what it once had, also from an emptied stream."""
        answers = await asyncio.gather(*under_way)
        if any(answer.duplicate for answer in answers) and (await self._find_end(namespace) or 0) < last:
            raise SinkUnavailable(
                "the stream was emptied, and the server still drops as repeated what was in it: wait until the "
                "stream's duplicate window is over (2 minutes, if the sink made it), or delete the stream instead"
            )

    def _names(self, namespace: str) -> tuple[str, str]:
        safe = _UNSAFE.sub(lambda found: f"_{ord(found.group()):X}_", namespace)
        return f"{self._stream}_{safe}", f"{self._subject}.{safe}"


def _number(namespace: str, message_id: str) -> int:
    owner, _, number = message_id.rpartition(":")
    if owner != namespace or not number.isdecimal():
        raise HistoryDiffers(f"the last message of the stream, {message_id!r}, is not an event of {namespace}")
    return int(number)


async def _quiet(error: Exception) -> None:
    """The client reports every lost connection here; the delivery that fails because of it says so anyway."""


def _nats() -> Any:
    try:
        import nats
        import nats.js.errors
    except ImportError as error:
        raise InvalidInput("type", f"nats needs nats-py ({error}); pip install 'omnirelay-dagster[nats]'") from error
    return nats
