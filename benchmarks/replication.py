"""Replication: the codec against orjson, the relay to each sink against that sink's bare client, and what a relay
costs the queue.

A bare client writes the very bytes that the sink would, made beforehand, in the same batches: it reads no log, encodes
nothing and keeps no checkpoint. They are made once for all rounds, since what a round gave back to the system the relay
would have to ask it for again. Raw and relay take turns within a round, and a ratio is the median over the rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import obstore
import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks import stores
from benchmarks.hub import hub_ingest, hub_server, hub_sink, raw_hub
from benchmarks.targets import Target
from lease_core import LeaseQueue, WorkItem
from lease_core.replication import (
    Batch,
    HttpSink,
    JsonlSink,
    NatsSink,
    ObjectStoreSink,
    OpenLineageSink,
    Relay,
    Rules,
    Sink,
    SqlSink,
    decode_event,
    decode_events,
    encode_events,
)
from lease_core.replication.sealed import Seal, seal
from lease_core.replication.sinks.object_store import key_of, open_object_store
from lease_core.replication.sinks.openlineage import run_event
from tests.servers.nats import NatsServer
from tests.servers.ports import free_port
from tests.servers.s3 import S3Server

BATCH = 1_000
MANY = 120_000
MOST = 480_000
"""Events for those that do a million a second: what a relay needs to get going must not be what is measured."""
SINK_RATIO, CODEC_RATIO, QUEUE_RATIO = 0.6, 0.4, 0.9
Make = Callable[[list[Batch]], list[Any]]
"""What a bare client writes of each batch."""
Bare = Callable[[Path, list[Any]], Iterator[None]]
"""Writes what was made of one batch after the other to a place, one at each step."""
Contest = tuple[str, int, Make, Bare, Callable[[Path], Sink]]


class Bench:
    """One run: a log to replicate, the servers, and what was measured."""

    def __init__(self, scratch: Path, quick: bool, console: Console, stack: ExitStack, items: int = MOST // 3) -> None:
        self.scratch, self.quick, self.console, self.stack = scratch, quick, console, stack
        self.rounds = 3 if quick else 7
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []
        self.numbers = itertools.count()
        self.queue = stack.enter_context(LeaseQueue.open(f"sqlite:///{scratch}/source.db"))
        self.batches = self._fill(10_000 if quick else items)

    def _fill(self, items: int) -> list[Batch]:
        for start in range(0, items, 500):
            self.queue.enqueue(
                [WorkItem("file", f"s3://raw/{start + n}.json", attributes={"etag": "9f2c"}) for n in range(500)]
            )
            leases = self.queue.lease("worker-1", limit=500)
            self.queue.complete(leases, result={"uri": f"s3://out/{start}.parquet"})
        head = self.queue.stats().head
        pages = [self.queue.event_payload(after, BATCH) for after in range(0, head, BATCH)]
        return [Batch.of_payload("resourcelease", 1 + BATCH * n, *page) for n, page in enumerate(pages)]

    def record(self, work: str, ours: list[float], theirs: list[float], needed: float) -> None:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        verdict = "PASS" if ratio >= needed else "MISS"
        row = {
            "work": work,
            "ours_per_second": round(statistics.median(ours)),
            "raw_per_second": round(statistics.median(theirs)),
            "ratio": round(ratio, 3),
            "needed": needed,
            "verdict": verdict,
        }
        self.rows.append(row)
        self.targets.append(Target(work, f"at least {needed:g}x", ratio, verdict))
        self.console.print(f"{work}: {row['ours_per_second']:,} against {row['raw_per_second']:,}, {ratio:.2f}x")


def run(scratch: Path, quick: bool, console: Console, results: Path, only: str = "replication") -> list[Target]:
    """Measure everything but the hub, or the hub only, show it and write it to ``results``."""
    with ExitStack() as stack:
        bench = Bench(scratch, quick, console, stack, items=80_000 if only == "hub" else MOST // 3)
        for part in (codec, sinks, queue_beside_a_relay) if only != "hub" else (hub_ingest,):
            part(bench)
        table = Table(title="Replication, events per second", title_justify="left", title_style="bold")
        for column in ("work", "ours", "raw", "ratio", "needed", "verdict"):
            table.add_column(column, justify="left" if column in ("work", "verdict") else "right")
        for row in bench.rows:
            table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()))
        console.print(table)
        kind = "hub" if only == "hub" else "replication"
        name = f"{kind}-quick.json" if quick else f"{kind}.json"
        results.mkdir(exist_ok=True)
        (results / name).write_text(
            json.dumps({"schema_version": 1, "quick": quick, "rows": bench.rows}, indent=1) + "\n"
        )
        return bench.targets


def rate(events: int, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return events / (time.perf_counter() - started)


# The codec


def codec(bench: Bench) -> None:
    import orjson

    lines = [line.encode() for batch in bench.batches[:20] for line in batch.lines]
    plain = [orjson.loads(line) for line in lines]
    events = [decode_event(line) for line in lines]
    payload = encode_events(events)
    ours: dict[str, list[float]] = {"encode": [], "decode": []}
    theirs: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(bench.rounds):
        theirs["encode"].append(rate(len(lines), lambda: [orjson.dumps(each) for each in plain]))
        ours["encode"].append(rate(len(lines), lambda: encode_events(events)))
        theirs["decode"].append(rate(len(lines), lambda: [orjson.loads(line) for line in lines]))
        ours["decode"].append(rate(len(lines), lambda: decode_events(payload)))
    for what in ours:
        bench.record(f"codec, {what}, against orjson on plain dictionaries", ours[what], theirs[what], CODEC_RATIO)


# Sinks


def sinks(bench: Bench) -> None:
    for name, most, make, raw, ours in contests(bench):
        batches = bench.batches[: max(2, most // BATCH)]
        made = make(batches)
        rates: tuple[list[float], list[float]] = ([], [])
        # what is over in a fraction of a second is measured more often
        for number in range((bench.rounds if most < MANY else 2 * bench.rounds) + 1):
            place = bench.scratch / f"{name.replace(' ', '-')}-{next(bench.numbers)}"
            stores.rest()
            bare = bare_rate(raw(place / "raw", made), batches)
            stores.rest()
            relayed = relay_rate(bench, ours(place / "ours"), batches)
            stores.empty(place)
            if number:  # the first round only warms up
                rates[0].append(relayed)
                rates[1].append(bare)
        bench.record(f"relay to {name}, against its bare client", *rates, SINK_RATIO)


def bare_rate(writing: Iterator[None], batches: list[Batch]) -> float:
    """Events a second, from the second batch on: connecting and making tables are not what is measured."""
    next(writing)
    started = time.perf_counter()
    written = sum(1 for _ in itertools.islice(writing, len(batches) - 1))
    seconds = time.perf_counter() - started
    assert written == len(batches) - 1
    assert next(writing, "at its end") == "at its end"
    return sum(map(len, batches[1:])) / seconds


def relay_rate(bench: Bench, sink: Sink, batches: list[Batch]) -> float:
    """The same for the relay: log to sink, with checkpoints kept in the queue as always."""
    bench.queue.drop_reader(f"relay/{sink.name}")
    relay = Relay(bench.queue, sink, rules=Rules(batch_size=BATCH, linger=0))
    relay.run_once(max_batches=1)
    started = time.perf_counter()
    [status] = relay.run_once(max_batches=len(batches) - 1)
    seconds = time.perf_counter() - started
    relay.stop()
    assert status.position == batches[-1].last, status
    return sum(map(len, batches[1:])) / seconds


def contests(bench: Bench) -> Iterator[Contest]:
    """Each sink with its bare client, and how many events to give them."""
    most, many, some, few = (30_000, 30_000, 10_000, 3_000) if bench.quick else (MOST, MANY, 40_000, 6_000)
    yield "a JSONL file, fsync", most, sealed, raw_file, JsonlSink
    yield "objects on local disk", most, objects, raw_objects({}), lambda place: ObjectStoreSink(f"file://{place}")
    yield "SQLite", many, rows, raw_sqlite, lambda place: SqlSink(f"sqlite:///{place.parent.with_suffix('.db')}")
    with S3Server() as s3:
        given = {"options": s3.options, "client_options": s3.client_options}
        url = s3.make_bucket("bench")
        yield (
            "S3 (moto)",
            some,
            objects,
            raw_objects({"url": url, **given}),
            lambda place: ObjectStoreSink(f"{url}/{place.parent.name}/ours", **given),
        )
    with stores.postgres(bench.scratch / "postgres") as databases:
        yield "PostgreSQL", some, rows, raw_postgres(databases), lambda place: SqlSink(fresh_postgres(databases))
    with NatsServer(bench.scratch / "nats") as server:
        yield (
            "NATS JetStream",
            some,
            messages,
            raw_nats(server.url),
            lambda place: NatsSink(server.url, stream=place.parent.name[-8:], subject=place.parent.name[-8:]),
        )
    with hub_server(f"sqlite:///{bench.scratch}/hub.db", bench.scratch / "hub.log") as address:
        yield "a hub", many, list, raw_hub(address), lambda place: hub_sink(address, place)
    with endpoint() as root:
        yield "an HTTP endpoint", most, payloads, raw_http(root), lambda place: HttpSink(f"{root}/events")
        yield "OpenLineage", few, run_events, raw_openlineage(root), lambda place: OpenLineageSink(root)


def sealed(batches: list[Batch]) -> list[bytes]:
    """The bytes that files and objects hold."""
    made: list[bytes] = []
    last: Seal | None = None
    for batch in batches:
        data, last = seal(batch, last)
        made.append(data)
    return made


def raw_file(place: Path, blocks: list[bytes]) -> Iterator[None]:
    place.parent.mkdir(parents=True)
    file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for block in blocks:
        os.write(file, block)
        os.fdatasync(file)
        yield
    os.close(file)


def objects(batches: list[Batch]) -> list[tuple[str, bytes]]:
    return [
        (key_of(batch.namespace, batch.first), block) for batch, block in zip(batches, sealed(batches), strict=True)
    ]


def raw_objects(given: dict[str, Any]) -> Bare:
    def write(place: Path, keyed: list[tuple[str, bytes]]) -> Iterator[None]:
        where = f"{given['url']}/{place.parent.name}/raw" if given else f"file://{place}"
        store = open_object_store(where, given.get("options"), given.get("client_options"))
        for key, block in keyed:
            obstore.put(store, key, block, mode="create")
            # on local disk it is in the system's cache by now. Ours forces files as it writes them, the folder for
            # several at once; a bare client that counts on each object must force both
            if not given:
                force(place / key)
                force((place / key).parent)
            yield

    return write


def force(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


TABLE = (
    "create table events (source varchar(255), namespace varchar(1024), sequence_number bigint, event text, "
    "crc32 bigint, primary key (source, namespace, sequence_number))"
)


Rows = list[tuple[str, str, int, str, int]]


def rows(batches: list[Batch]) -> list[Rows]:
    return [
        [
            ("", batch.namespace, number, line, zlib.crc32(line.encode()))
            for number, line in zip(batch.numbers, batch.lines, strict=True)
        ]
        for batch in batches
    ]


def raw_sqlite(place: Path, rows: list[Rows]) -> Iterator[None]:
    connection = sqlite3.connect(place.parent.with_name(place.parent.name + "-raw.db"))
    connection.execute(TABLE)
    for each in rows:
        with connection:
            connection.executemany("insert into events values (?, ?, ?, ?, ?)", each)
        yield
    connection.close()


def fresh_postgres(databases: stores.PostgresDatabases) -> str:
    return databases._endpoint.create_database(databases._name("relay"))


def raw_postgres(databases: stores.PostgresDatabases) -> Bare:
    def write(place: Path, rows: list[Rows]) -> Iterator[None]:
        with psycopg.connect(stores.plain(fresh_postgres(databases)), autocommit=True) as connection:
            connection.execute(TABLE)
            for each in rows:
                with connection.transaction(), connection.cursor() as cursor:
                    cursor.executemany("insert into events values (%s, %s, %s, %s, %s)", each)
                yield

    return write


def messages(batches: list[Batch]) -> list[list[tuple[str, bytes]]]:
    return [
        [
            (f"{batch.namespace}:{number}", line.encode())
            for number, line in zip(batch.numbers, batch.lines, strict=True)
        ]
        for batch in batches
    ]


def raw_nats(url: str) -> Bare:
    async def begin(stream: str) -> tuple[Any, Any]:
        connection = await nats.connect(url)
        jetstream = connection.jetstream()
        await jetstream.add_stream(name=stream, subjects=[stream])
        return connection, jetstream

    async def publish(jetstream: Any, stream: str, batch: list[tuple[str, bytes]]) -> None:
        under_way = [
            await jetstream.publish_async(stream, line, headers={"Nats-Msg-Id": message}) for message, line in batch
        ]
        await asyncio.gather(*under_way)

    def write(place: Path, batches: list[list[tuple[str, bytes]]]) -> Iterator[None]:
        stream = f"raw{place.parent.name[-8:]}"
        with asyncio.Runner() as runner:
            connection, jetstream = runner.run(begin(stream))
            for batch in batches:
                runner.run(publish(jetstream, stream, batch))
                yield
            runner.run(connection.close())

    return write


def payloads(batches: list[Batch]) -> list[bytes]:
    return [batch.payload for batch in batches]


def raw_http(root: str) -> Bare:
    def write(place: Path, payloads: list[bytes]) -> Iterator[None]:
        with httpx.Client() as client:
            for payload in payloads:
                client.post(f"{root}/events", content=payload).raise_for_status()
                yield

    return write


def run_events(batches: list[Batch]) -> list[list[Any]]:
    return [[run_event(event) for event in batch.events if event.type == "Completed"] for batch in batches]


def raw_openlineage(root: str) -> Bare:
    from openlineage.client import OpenLineageClient

    def write(place: Path, made: list[list[Any]]) -> Iterator[None]:
        client = OpenLineageClient(config={"transport": {"type": "http", "url": root}})
        for each in made:
            for event in each:
                client.emit(event)
            yield

    return write


@contextmanager
def endpoint() -> Iterator[str]:
    """An endpoint in a process of its own that reads what it gets and says yes."""
    port = free_port()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    process.start()
    root = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.post(f"{root}/events", content=b"")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        yield root
    finally:
        process.terminate()
        process.join()


def serve(port: int) -> None:
    import uvicorn

    async def take(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    uvicorn.run(take, host="127.0.0.1", port=port, log_level="error", lifespan="off")


# The queue beside a relay


def queue_beside_a_relay(bench: Bench) -> None:
    """Whole cycles in batches of 100: with a relay process that follows, and with one whose sink is dead.

    A disk's speed changes more within seconds than a relay costs. So two queues take turns, a fraction of a second
    each: one with a relay and one without, and the relay's process is stopped while it is the other's turn.
    """
    for case, told in (("file", "a relay running"), ("dead", "a relay to a dead sink")):
        folder = bench.scratch / f"beside-{next(bench.numbers)}"
        folder.mkdir()
        with (
            LeaseQueue.open(f"sqlite:///{folder}/alone.db") as alone,
            LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue,
            beside(case, folder, queue) as relay,
        ):
            rates: tuple[list[float], list[float]] = ([], [])
            for turn in range(10 * bench.rounds):
                relay.send_signal(signal.SIGSTOP)
                rates[1].append(cycles(alone, turn))
                relay.send_signal(signal.SIGCONT)
                rates[0].append(cycles(queue, turn))
        bench.record(f"the queue with {told}, against alone", *rates, QUEUE_RATIO)


def cycles(queue: LeaseQueue, turn: int, rounds: int = 40) -> float:
    started = time.perf_counter()
    for number in range(rounds * turn, rounds * (turn + 1)):
        queue.enqueue([WorkItem("file", f"s3://raw/{100 * number + n}.json") for n in range(100)])
        queue.complete(queue.lease("w", limit=100))
    return 100 * rounds / (time.perf_counter() - started)


@contextmanager
def beside(case: str, folder: Path, queue: LeaseQueue) -> Iterator[subprocess.Popen[bytes]]:
    """A relay process on the queue, past its start."""
    sink = {"file": f'type = "jsonl"\npath = "{folder}/copy"', "dead": 'type = "http"\nurl = "http://127.0.0.1:9/"'}
    config = folder / "relay.toml"
    config.write_text(f'[relay]\nurl = "sqlite:///{folder}/queue.db"\n[sinks.one]\n{sink[case]}\n')
    with (folder / "relay.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lease_core.cli", "relay", "--config", str(config)], stderr=log, stdout=log
        )
    try:
        queue.enqueue(WorkItem("file", "first"))
        while not (queue.readers().get("relay/one") or b"failed 2 times" in (folder / "relay.log").read_bytes()):
            if process.poll() is not None:
                raise RuntimeError(f"the relay ended: {(folder / 'relay.log').read_text()[-500:]}")
            time.sleep(0.05)  # until it is past its start, which is not what is measured
        yield process
    finally:
        process.terminate()
        process.wait()
