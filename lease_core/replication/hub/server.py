"""The hub as a server, in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any

import sqlalchemy as sa

from lease_core.errors import InvalidConfig, StoreUnavailable
from lease_core.replication.hub import wire
from lease_core.replication.hub.addresses import parse
from lease_core.replication.hub.credentials import PathLike, server_credentials
from lease_core.replication.hub.schema import why
from lease_core.replication.hub.servicer import Servicer
from lease_core.replication.hub.store import HubStore
from lease_core.replication.hub.writer import Writer

logger = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_PRUNE_SECONDS = 600.0
_MOST_DAYS = 36_500


class HubServer:
    """Takes batches of events from many sources, keeps them in the database at ``url``, and serves them to readers.

    ``certificate`` and ``key`` are PEM files for TLS; with ``client_ca`` too it is mutual TLS, and a source is who its
    certificate says. Without them it listens on this machine only, unless it is told to be ``insecure``. ``port`` is
    the one it listens on, also if ``listen`` asked for port 0. Events older than
    ``keep_days`` are let go of, once every reader with a cursor has passed them. ``meter`` is as of a relay.
    """

    def __init__(
        self,
        url: str | sa.URL,
        listen: str = "127.0.0.1:8765",
        *,
        certificate: PathLike | None = None,
        key: PathLike | None = None,
        client_ca: PathLike | None = None,
        insecure: bool = False,
        most_bytes: int = wire.MOST_BYTES,
        most_pending: int = 64 << 20,
        keep_days: float | None = None,
        meter: Any = None,
    ) -> None:
        parse("listen", listen)
        if keep_days is not None and not 0 < keep_days <= _MOST_DAYS:
            raise InvalidConfig(
                "keep_days", f"must be above 0 and at most {_MOST_DAYS} (got {keep_days:g}); leave it out to keep all"
            )
        self._url, self._listen = url, listen
        self._credentials = server_credentials(listen, certificate, key, client_ca, insecure)
        self._most_bytes, self._most_pending, self._meter = most_bytes, most_pending, meter
        self._keep = None if keep_days is None else timedelta(days=keep_days)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self.port = 0
        self.writer: Writer | None = None

    def start(self) -> HubServer:
        """Open the database and listen. Raises what is in the way of that."""
        self._ready.clear()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            failure, self._failure, self._thread = self._failure, None, None
            raise failure
        return self

    def stop(self) -> None:
        """Answer what was offered, end every stream and close the database. Harmless when it is not running."""
        loop, stopping, thread = self._loop, self._stopping, self._thread
        if thread is None or loop is None or stopping is None:
            return
        if thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
        thread.join()
        self._thread = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def stored(self) -> int:
        """Events that were offered and are kept, those that had been there before counted again."""
        return self.writer.events if self.writer is not None else 0

    def __enter__(self) -> HubServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                logger.exception("the hub ended")
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        store = self._open()
        try:
            writer = Writer(store, most_pending=self._most_pending, meter=self._meter)
            servicer = Servicer(store, writer, self._most_bytes, self._stopping)
            self.writer = writer
            try:
                server = self._bind(servicer)
                await server.start()
                self._ready.set()
                pruning = asyncio.create_task(self._prune(writer))
                await self._stopping.wait()
                pruning.cancel()
                await writer.wake()
                await server.stop(_STOP_SECONDS)
            finally:
                await writer.close()
                servicer.close()
        finally:
            store.close()

    async def _prune(self, writer: Writer) -> None:
        while self._keep is not None:
            try:
                await writer.prune(datetime.now(UTC) - self._keep)
            except Exception as error:  # the next time will do
                logger.warning("the hub cannot let go of old events for now: %s", why(error))
            await asyncio.sleep(max(1.0, min(_PRUNE_SECONDS, self._keep.total_seconds())))

    def _open(self) -> HubStore:
        try:
            return HubStore(self._url)
        except sa.exc.SQLAlchemyError as error:  # its text may have the address in it, and that a password
            raise StoreUnavailable(f"url: the hub's database cannot be opened ({why(error)})") from None

    def _bind(self, servicer: Servicer) -> Any:
        server = wire.grpc().aio.server(options=_options(self._most_bytes))
        wire.services().add_HubServicer_to_server(servicer, server)
        try:
            if self._credentials is None:
                self.port = server.add_insecure_port(self._listen)
            else:
                self.port = server.add_secure_port(self._listen, self._credentials)
        except RuntimeError as error:
            raise InvalidConfig("listen", f"cannot listen on {self._listen}: {error}") from None
        return server


def _options(most_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", most_bytes + wire.SLACK),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # two hubs on one port would each get half of the streams
        ("grpc.keepalive_time_ms", 20_000),  # a client whose network is gone is let go
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
