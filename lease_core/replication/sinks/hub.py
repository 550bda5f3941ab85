"""Events to a hub, over a gRPC stream that stays open."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import Any

from lease_core.replication.batch import Batch
from lease_core.replication.errors import HistoryDiffers, RefusedForGood, SinkUnavailable
from lease_core.replication.hub import wire
from lease_core.replication.hub.client import HubClient, said
from lease_core.replication.hub.credentials import PathLike


class HubSink:
    """Publishes batches to the hub at ``address``, which answers when they are durable and knows what it has.

    ``source`` is the name of this log at the hub; with mutual TLS it is the certificate's, and need not be given. A
    copy begins at event 1, unless ``begin_late`` allows it to begin where the relay does, because the log was pruned.
    It has no gaps, so that nothing can follow an event that the hub refuses, though the relay's rule is to skip it.
    TLS is by ``ca``, mutual TLS by ``certificate`` and ``key`` too (PEM files); to another machine nothing goes in the
    clear unless ``insecure`` says so.
    """

    compares = True

    def __init__(
        self,
        address: str,
        name: str = "hub",
        *,
        source: str = "",
        begin_late: bool = False,
        timeout: float = 30.0,
        ca: PathLike | None = None,
        certificate: PathLike | None = None,
        key: PathLike | None = None,
        insecure: bool = False,
        server_name: str | None = None,
    ) -> None:
        self.name = name
        self._source, self._begin_late, self._timeout = source, begin_late, timeout
        self._client = HubClient(
            address, ca=ca, certificate=certificate, key=key, insecure=insecure, server_name=server_name
        )
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._most_bytes = 0
        self._refused = 0  # the last event that was refused alone

    def deliver(self, batch: Batch) -> None:
        try:
            self._deliver(batch)
        except RefusedForGood:
            self._refused = batch.first if len(batch) == 1 else self._refused
            raise

    def _deliver(self, batch: Batch) -> None:
        if self._most_bytes and len(batch.payload) > self._most_bytes:
            raise RefusedForGood(f"it is larger than the hub takes ({self._most_bytes} bytes)")
        message = wire.messages().Batch(
            source=self._source,
            namespace=batch.namespace,
            first=batch.first,
            last=batch.last,
            lines=batch.payload,
            begins=self._begin_late,
        )
        with self._lock:
            answer = self._exchange(message)
        outcome = wire.messages().Outcome
        match answer.outcome:
            case outcome.STORED if answer.next > batch.last:
                return
            case outcome.MISSING if answer.next == self._refused:
                raise HistoryDiffers(
                    f"the hub refused event {self._refused}, and its copies have no gaps, so that it takes nothing "
                    "after it: let the hub take it, or begin another copy after it (another source, and begin_late)"
                )
            case outcome.MISSING if answer.next == 1 and not self._begin_late:  # for an operator, or for going back
                raise SinkUnavailable(
                    f"the hub asks for events from 1 on, as a copy begins there, and got {batch.first}: let the sink "
                    "begin_late, if the relay's start is not the beginning; or set start to beginning"
                )
            case outcome.MISSING:  # the relay asks for the position anew, and goes on from there
                raise SinkUnavailable(f"the hub asks for events from {answer.next} on: {answer.reason}")
            case outcome.REWRITES_HISTORY:
                raise HistoryDiffers(f"{answer.reason}: this is another log than the hub has under that name")
            case outcome.INVALID:
                raise RefusedForGood(answer.reason, answer.sequence_number or None)
            case _:
                raise SinkUnavailable(answer.reason or f"the hub gave answer {answer.outcome}")

    def position(self, namespace: str) -> int:
        request = wire.messages().PositionRequest(source=self._source, namespace=namespace)
        try:
            found = self._client.stub().Position(request, timeout=self._timeout)
        except wire.grpc().RpcError as error:
            raise SinkUnavailable(said(error)) from None
        self._most_bytes = found.most_bytes
        return int(found.last)

    def close(self) -> None:
        with self._lock:
            self._drop()
            self._client.close()

    def _exchange(self, message: Any) -> Any:
        if self._stream is not None and self._stream.ended:
            self._drop()
        if self._stream is None:
            self._stream = _Stream(self._client.stub(), f"relay-{self.name}-answers")
        try:
            return self._stream.exchange(message, self._timeout)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class _Stream:
    """One call to ``Publish``: a batch out, its answer in. A thread waits for answers, so that one may be late."""

    def __init__(self, stub: Any, name: str) -> None:
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._call = stub.Publish(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._receive, name=name, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def exchange(self, message: Any, timeout: float) -> Any:
        self._requests.put(message)
        try:
            answer = self._answers.get(timeout=timeout)
        except Empty:
            raise SinkUnavailable(f"no answer from the hub in {timeout:g} s") from None
        if isinstance(answer, SinkUnavailable):
            raise answer
        return answer

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._thread.join(5.0)

    def _receive(self) -> None:
        failed = wire.grpc().RpcError
        try:
            for answer in self._call:
                self._answers.put(answer)
            self._answers.put(SinkUnavailable("the hub ended the stream"))
        except failed as error:
            self._answers.put(SinkUnavailable(said(error)))
