"""The hub: batches streamed in and made durable, against a bare gRPC stream of the same batches that stores nothing.

Client and messages are the same for both, servers are processes of their own, and both keep up to 32 batches under way
in each stream. Every source sends the same log under its own name, which is another one in every round: both servers
serve all rounds, as they would for months. The first round only warms them up.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from rich.console import Console

from benchmarks import stores
from lease_core.replication import Batch, HubSink
from lease_core.replication.hub import hub_pb2, hub_pb2_grpc
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from benchmarks.replication import Bench

INGEST_RATIO = 0.35
WINDOW = 32


def run(scratch: Path, quick: bool, console: Console, results: Path) -> None:
    from benchmarks import replication  # which measures the relay to a hub with what is here

    replication.run(scratch, quick, console, results, only="hub")


def hub_ingest(bench: Bench) -> None:
    """One source and four at once, on both databases."""
    size = 60 if bench.quick else 240
    with stores.postgres(bench.scratch / "postgres-hub") as databases, bare_server() as bare:
        for store in ("SQLite", "PostgreSQL"):
            place = bench.scratch / f"hub-{next(bench.numbers)}"
            url = f"sqlite:///{place}.db" if store == "SQLite" else fresh_postgres(databases)
            with hub_server(url, place.with_suffix(".log")) as hub:
                for sources in (1, 4):
                    many = "one source" if sources == 1 else f"{sources} sources"
                    ours, theirs = contest(hub, bare, bench.batches[: size // sources], sources, 2 * bench.rounds)
                    bench.record(f"hub ingest, {many}, {store}, against a bare stream", ours, theirs, INGEST_RATIO)


def contest(hub: str, bare: str, batches: list[Batch], sources: int, rounds: int) -> tuple[list[float], list[float]]:
    """Events a second at the hub and at the bare server, which take turns."""
    rates: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        stores.rest()
        stored = ingest_rate(hub, batches, sources, f"{sources}-at-once-{number}")
        stores.rest()
        streamed = ingest_rate(bare, batches, sources)
        if number:  # the first round only warms up
            rates[0].append(stored)
            rates[1].append(streamed)
    return rates


def fresh_postgres(databases: stores.PostgresDatabases) -> str:
    return databases._endpoint.create_database(databases._name("hub"))


def ingest_rate(address: str, batches: list[Batch], sources: int, name: str = "source") -> float:
    """Events a second from the second batch on, until the last answer."""
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub = hub_pb2_grpc.HubStub(channel)
        streams = [Source(stub, f"{name}-{number}", batches) for number in range(sources)]
        for stream in streams:
            stream.first()
        started = time.perf_counter()
        threads = [threading.Thread(target=stream.rest) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
    assert all(stream.answered == len(batches) for stream in streams)
    return sources * sum(map(len, batches[1:])) / seconds


class Source:
    """One stream of prepared messages."""

    def __init__(self, stub: Any, name: str, batches: list[Batch]) -> None:
        self._messages = [
            hub_pb2.Batch(source=name, namespace=each.namespace, first=each.first, last=each.last, lines=each.payload)
            for each in batches
        ]
        self._room = threading.Semaphore(1)
        self._answers = stub.Publish(self._send())
        self.answered = 0

    def _send(self) -> Iterator[hub_pb2.Batch]:
        for message in self._messages:
            self._room.acquire()
            yield message

    def first(self) -> None:
        self._take(next(self._answers))
        self._room.release(WINDOW)

    def rest(self) -> None:
        for answer in self._answers:
            self._take(answer)
            self._room.release()

    def _take(self, answer: hub_pb2.Answer) -> None:
        assert answer.outcome == hub_pb2.STORED, answer
        self.answered += 1


def raw_hub(address: str) -> Any:
    """A bare client of a real hub, one batch at a time as a relay sends them."""

    def write(place: Path, batches: list[Batch]) -> Iterator[None]:
        with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            source = Source(hub_pb2_grpc.HubStub(channel), f"{place.parent.name}-raw", batches)
            source.first()
            for _ in range(WINDOW):
                source._room.acquire()
            yield
            for _ in batches[1:]:
                source._room.release()
                source._take(next(source._answers))
                yield

    return write


def hub_sink(address: str, place: Path) -> HubSink:
    return HubSink(address, source=f"{place.parent.name}-ours")


@contextmanager
def hub_server(url: str, log: Path) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lease_core.cli", "hub", "--listen", address],
            env={**os.environ, "OMNIRELAY_HUB__URL": url},
            stdout=output,
            stderr=output,
        )
    try:
        await_port(address, process.poll)
        yield address
    finally:
        process.terminate()
        process.wait()


@contextmanager
def bare_server() -> Iterator[str]:
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    process.start()
    try:
        await_port(f"127.0.0.1:{port}", lambda: process.exitcode)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def await_port(address: str, ended: Any) -> None:
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            if ended() is not None:
                raise RuntimeError("the server ended before it listened") from None
            time.sleep(0.05)


class Bare:
    async def Publish(self, requests: Any, context: Any) -> Any:
        async for batch in requests:
            yield hub_pb2.Answer(outcome=hub_pb2.STORED, next=batch.last + 1)

    Position = Read = Follow = KeepCursor = Sources = None


def serve(port: int) -> None:
    async def run() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        hub_pb2_grpc.add_HubServicer_to_server(Bare(), server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())
