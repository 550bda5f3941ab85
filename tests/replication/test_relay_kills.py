"""kill -9 of the relay at random, with every sink real: each ends with every event exactly once, in order."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lease_core import LeaseEvent, LeaseQueue
from lease_core.replication import HubServer, decode_event, each_event, read_hub, read_jsonl, read_segments, read_sql
from tests.replication.conftest import work
from tests.replication.test_sinks import messages
from tests.servers.http_endpoint import HttpEndpoint
from tests.servers.nats import NatsServer

CONFIG = """
[relay]
url = "sqlite:///{folder}/queue.db"
interval = 0.02

[sinks.files]
type = "jsonl"
path = "{folder}/files"
max_bytes = 100000
{rules}

[sinks.segments]
type = "objects"
url = "{bucket}"
options = {options}
client_options = {client_options}
linger = 0.1
{rules}

[sinks.database]
type = "sql"
url = "{postgres}"
{rules}

[sinks.endpoint]
type = "http"
url = "{endpoint}/events"
{rules}

[sinks.bus]
type = "nats"
servers = "{nats}"
stream = "{stream}"
subject = "{stream}"
{rules}

[sinks.hub]
type = "hub"
address = "{hub}"
source = "eu-1"
{rules}

[sinks.lineage]
type = "openlineage"
url = "{endpoint}"
{rules}
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0") as server:
        yield f"127.0.0.1:{server.port}"


def inline(table: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) + " }"


class Relayed:
    """A relay process that is killed again and again while the queue works, then left to finish."""

    def __init__(self, config: Path, queue: LeaseQueue) -> None:
        self._config, self._queue = config, queue
        self.kills = 0

    def start(self) -> subprocess.Popen[bytes]:
        with self._config.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "lease_core.cli", "relay", "--config", str(self._config)],
                stdout=log,
                stderr=log,
                env=os.environ,
            )

    def survive(self, kills: int, busy: threading.Thread, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        chance = random.Random(5)
        while self.kills < kills:
            process = self.start()
            try:
                self._await_progress(process, deadline)
                time.sleep(chance.uniform(0.0, 0.4))
            finally:
                process.kill()
                process.wait()
            self.kills += 1
        process = self.start()
        try:
            busy.join(timeout)
            head = self._queue.stats().head
            while set(self._queue.readers().values()) != {head}:
                self._check(process, deadline)
        finally:
            process.terminate()
            process.wait(60)

    def _await_progress(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        before = self._queue.readers()
        while self._queue.readers() == before:
            self._check(process, deadline)

    def _check(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        if process.poll() is not None or time.monotonic() > deadline:
            log = self._config.with_suffix(".log").read_text()[-3000:]
            pytest.fail(f"the relay ended or is stuck at {self._queue.readers()}:\n{log}")
        time.sleep(0.02)


class Places(NamedTuple):
    """The queue, and all the places that its log is delivered to."""

    queue: LeaseQueue
    folder: Path
    bucket: dict[str, Any]
    postgres_url: str
    endpoint: HttpEndpoint
    nats_url: str
    hub: str


@pytest.fixture
def places(
    queue: LeaseQueue,
    tmp_path: Path,
    bucket: Callable[[], dict[str, Any]],
    postgres_url: str,
    endpoint: HttpEndpoint,
    nats_server: NatsServer,
    hub: str,
) -> Places:
    return Places(queue, tmp_path, bucket(), postgres_url, endpoint, nats_server.url, hub)


def deliver(to: Places, items: int, kills: int, batch: int) -> None:
    """Deliver the log of so many items while the relay is killed so often, then compare every copy with it."""
    queue, folder, store, endpoint = to.queue, to.folder, to.bucket, to.endpoint
    stream = f"K{folder.name[-8:]}{items}".replace("_", "")
    config = folder / "relay.toml"
    config.write_text(
        CONFIG.format(
            folder=folder,
            bucket=store["url"],
            options=inline(store["options"]),
            client_options=inline(store["client_options"]),
            postgres=to.postgres_url,
            endpoint=endpoint.root,
            nats=to.nats_url,
            hub=to.hub,
            stream=stream,
            rules=f"batch_size = {batch}\ncheckpoint_every = 0.05\nretry_most = 0.5",
        )
    )
    work(queue, items // 2)  # a relay is behind when it is first started, and the queue goes on while it is killed
    busy = threading.Thread(target=work, args=(queue, items - items // 2))
    busy.start()
    Relayed(config, queue).survive(kills, busy, timeout=120 + items / 20)
    expected = list(each_event(queue))
    assert len(expected) == 3 * items
    copies: dict[str, Iterable[LeaseEvent]] = {
        "files": read_jsonl(folder / "files").read(strict=True),
        "segments": read_segments(**store).read(),
        "database": read_sql(to.postgres_url, "resourcelease").read(),
        "endpoint": (decode_event(json.dumps(event)) for event in endpoint.events),
        "hub": read_hub(to.hub, "eu-1").read(),
        "bus": messages(to.nats_url, f"{stream}_resourcelease"),
    }
    for name, copy in copies.items():
        assert list(copy) == expected, name
    completed = [event.sequence_number for event in expected if event.type == "Completed"]
    lineage = [run["run"]["facets"]["omnirelay_lease"]["sequenceNumber"] for run in endpoint.runs.values()]
    assert lineage == completed


def test_every_sink_has_every_event_once_however_often_the_relay_is_killed(places: Places) -> None:
    deliver(places, items=800, kills=5, batch=40)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_the_same_with_a_hundred_thousand_events(places: Places) -> None:
    deliver(places, items=33_334, kills=40, batch=500)
