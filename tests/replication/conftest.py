"""Real servers for the sinks, each started once for the session, and queues with something in their log."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseQueue, WorkItem
from tests.servers.gcs import GcsServer
from tests.servers.http_endpoint import HttpEndpoint
from tests.servers.nats import NatsServer
from tests.servers.s3 import S3Server


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(s3_server: S3Server) -> Iterator[GcsServer]:
    with GcsServer(s3_server) as server:
        yield server


@pytest.fixture
def gcs_bucket(gcs_server: GcsServer) -> Callable[[], dict[str, Any]]:
    """The same as ``bucket`` in Google's store."""
    url = gcs_server.make_bucket(f"bucket-{uuid.uuid4().hex[:12]}") + "/some/prefix"
    return lambda: {"url": url, "options": gcs_server.options, "client_options": gcs_server.client_options}


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """The arguments with which an object-store sink or reader gets at a new place in a bucket, under a prefix.

    The bucket is one of our own S3 server, or the one that OMNIRELAY_TEST_OBJECTS_URL names.
    """
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    if given := os.environ.get("OMNIRELAY_TEST_OBJECTS_URL"):
        url = f"{given}/{name}/some/prefix"
        return lambda: {"url": url, "options": {}, "client_options": S3Server.client_options}
    server: S3Server = request.getfixturevalue("s3_server")
    url = server.make_bucket(name) + "/some/prefix"
    return lambda: {"url": url, "options": server.options, "client_options": server.client_options}


@pytest.fixture
def endpoint() -> Iterator[HttpEndpoint]:
    with HttpEndpoint() as server:
        yield server


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as opened:
        yield opened


def work(queue: LeaseQueue, items: int) -> int:
    """Enqueue, lease and complete so many items; gives the number of the last event."""
    done = 0
    while done < items:
        size = min(100, items - done)
        queue.enqueue([WorkItem("file", f"s3://raw/{done + index}.json", body=b"\x00\xff") for index in range(size)])
        leases = queue.lease("worker-1", limit=size)
        queue.complete(leases, result={"uri": f"s3://out/{done}"}, principal="svc")
        done += size
    return queue.stats().head
