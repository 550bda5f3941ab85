"""All sources, merged: reading the hub as one stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.model import LeaseEvent, Value
from lease_core.replication.backoff import Backoff
from lease_core.replication.codec import decode_events
from lease_core.replication.errors import CorruptCopy, UnreadableEvent
from lease_core.replication.hub import wire
from lease_core.replication.hub.client import HubClient, meaning
from lease_core.replication.hub.credentials import PathLike


class MergedEvent(Value, frozen=True):
    """An event with its place among those of all sources. Places are dense, and never change."""

    position: int
    source: str
    event: LeaseEvent

    @property
    def namespace(self) -> str:
        return self.event.namespace


class SourceStatus(Value, frozen=True):
    """What the hub holds of one source and namespace."""

    source: str
    namespace: str
    first: int
    last: int


def follow_hub(
    address: str,
    reader: str = "",
    *,
    source: str = "",
    namespace: str = "",
    patience: float = 60.0,
    ca: PathLike | None = None,
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    insecure: bool = False,
    server_name: str | None = None,
) -> HubFollower:
    """A reader of the merged stream of the hub at ``address``, or of one ``source`` or ``namespace`` in it.

    Under the name ``reader`` the hub keeps how far it has come. A hub that goes away is waited for, no longer than
    ``patience`` seconds.
    """
    client = HubClient(address, ca=ca, certificate=certificate, key=key, insecure=insecure, server_name=server_name)
    return HubFollower(client, reader, source, namespace, patience)


class HubFollower:
    """Reads the merged stream at its own pace; the hub holds no more than a page for it."""

    def __init__(self, client: HubClient, reader: str, source: str, namespace: str, patience: float) -> None:
        self._client, self._reader = client, reader
        self._source, self._namespace = source, namespace
        self._patience = patience
        self._backoff = Backoff(0.1, 2.0)
        self._closed = threading.Event()

    def events(self, after: int | None = None, *, once: bool = False) -> Iterator[MergedEvent]:
        """The events above position ``after``, or from the kept cursor on; then those to come, unless ``once``.

        Each event comes once and in order, also if the hub is restarted meanwhile.
        """
        place, failures, since = after, 0, time.monotonic()
        while not self._closed.is_set():
            try:
                for event in self._read(place, once):
                    yield event
                    place, failures = event.position, 0
                return
            except StoreUnavailable:
                if self._closed.is_set():
                    return
                since = since if failures else time.monotonic()
                failures += 1
                if time.monotonic() - since > self._patience:
                    raise
                self._closed.wait(self._backoff.pause(failures))

    def keep(self, position: int) -> int:
        """Keep at the hub that this reader has come to ``position``. Never moves back; gives what is kept."""
        if not self._reader:
            raise InvalidInput("reader", "a cursor is kept under a name: pass reader= to follow_hub")
        cursor = wire.messages().Cursor(reader=self._reader, position=position)
        return int(self._call("KeepCursor", cursor).position)

    def sources(self) -> list[SourceStatus]:
        """What the hub holds, by source and namespace."""
        found = self._call("Sources", wire.messages().SourcesRequest()).sources
        return [SourceStatus(each.source, each.namespace, each.first, each.last) for each in found]

    def close(self) -> None:
        """Ends the reading, also that of another thread."""
        self._closed.set()
        self._client.close()

    def _read(self, after: int | None, once: bool) -> Iterator[MergedEvent]:
        if after is None and not self._reader:
            after = 0
        request = wire.messages().FollowRequest(
            after=after or 0,
            reader=self._reader if after is None else "",
            source=self._source,
            namespace=self._namespace,
            once=once,
        )
        failed = wire.grpc().RpcError
        call = self._client.stub().Follow(request)
        try:
            for run in call:
                yield from self._expand(run, after)
                after = run.position + run.lines.count(b"\n") - 1
        except failed as error:
            raise meaning(error) from None
        except ValueError:  # what gRPC says of a channel that was closed
            if not self._closed.is_set():
                raise
        finally:
            call.cancel()

    def _expand(self, run: Any, after: int | None) -> Iterator[MergedEvent]:
        if run.HasField("damage"):
            raise CorruptCopy(f"hub {self._client.address}", run.damage.reason, run.damage.last_good)
        if after is not None and run.position > after + 1 and not (self._source or self._namespace):
            place = f"hub {self._client.address}"
            raise CorruptCopy(place, f"positions {after + 1} to {run.position - 1} are missing", after)
        try:
            events = decode_events(run.lines)
        except UnreadableEvent as error:  # its source wrote it like this
            place, last_good = (
                f"hub {self._client.address}, {run.source}/{run.namespace}",
                run.first + (error.line or 1),
            )
            raise CorruptCopy(place, error.problem, last_good - 2) from None
        for position, event in enumerate(events, run.position):
            yield MergedEvent(position, run.source, event)

    def _call(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._client.stub(), method)(request, timeout=max(1.0, self._patience))
        except wire.grpc().RpcError as error:
            raise meaning(error) from None
