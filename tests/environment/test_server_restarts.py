"""PostgreSQL is stopped or killed under a relay, a hub and a standby: each goes on by itself when it is back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.recovery import Standby
from lease_core.replication import (
    Backoff,
    HubServer,
    HubSink,
    JsonlSink,
    Relay,
    Rules,
    SqlSink,
    each_event,
    follow_hub,
    read_hub,
    read_jsonl,
    read_sql,
)
from tests.kills import audit
from tests.recovery.histories import same
from tests.replication.conftest import work
from tests.servers.postgres import PostgresServer

RULES = Rules(batch_size=50, linger=0.0, checkpoint_every=0.0, backoff=Backoff(0.02, 0.2))
IMPATIENT = QueueConfig(store_timeout=0.5)  # the copy's; what is under test is who tries again after that
PATIENT = QueueConfig(store_timeout=60)  # the workers', who are to have no trouble at all


@pytest.fixture(params=["stop", "kill"])
def leave(request: pytest.FixtureRequest, own_server: PostgresServer) -> Callable[[], None]:
    """Let the server go away."""
    act: Callable[[], None] = getattr(own_server, request.param)
    return act


@pytest.fixture
def other_url(own_server: PostgresServer, restartable_url: str) -> Iterator[str]:
    """A second database on the server that is restarted."""
    name = restartable_url.rpartition("/")[2] + "_other"
    yield own_server.create_database(name)
    own_server.drop_database(name)


def until(condition: Callable[[], bool], shown: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.01)


@contextmanager
def working(url: str) -> Iterator[None]:
    """Somebody works all the while, whatever happens to the server."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with LeaseQueue.open(url, config=PATIENT) as queue:
                while not stop.is_set():  # writes only: those are repeated until the server is back
                    queue.enqueue([WorkItem("file", str(n)) for n in range(10)])
                    queue.complete(queue.lease("worker", limit=10)).raise_if_refused()
        except BaseException as error:
            failed.append(error)

    busy = threading.Thread(target=run)
    busy.start()
    try:
        yield
    finally:
        stop.set()
        busy.join(90)
    assert not failed
    assert not busy.is_alive()


def go_and_come_back(server: PostgresServer, leave: Callable[[], None], noticed: Callable[[], bool]) -> None:
    """Away in the middle of the work, and back once that was noticed."""
    leave()
    try:
        until(noticed)
    finally:
        server.start()
    until(lambda: not noticed())


def test_a_relay_goes_on(
    own_server: PostgresServer, leave: Callable[[], None], restartable_url: str, other_url: str, tmp_path: Path
) -> None:
    """The log is on the server, and so is one of the copies."""
    with LeaseQueue.open(restartable_url, config=IMPATIENT) as queue:
        sinks = [JsonlSink(tmp_path), SqlSink(other_url)]
        with Relay(queue, sinks, rules=RULES, interval=0.01) as relay:
            with working(restartable_url):
                until(lambda: all((each.position or 0) > 100 for each in relay.status()), relay.status)
                go_and_come_back(own_server, leave, lambda: all(each.state == "retrying" for each in relay.status()))
            assert relay.wait_until(queue.stats().head, 60), relay.status()
            assert [each.state for each in relay.status()] == ["running", "running"]
        log = audit.check_queue(queue)
        assert list(read_jsonl(tmp_path).read(strict=True)) == log
        assert list(read_sql(other_url, queue.namespace).read()) == log
        assert set(queue.readers().values()) == {len(log)}


def test_a_hub_goes_on(
    own_server: PostgresServer, leave: Callable[[], None], restartable_url: str, tmp_path: Path
) -> None:
    """Its sources are told to come again; a reader that follows sees every position once."""
    url = f"sqlite:///{tmp_path}/queue.db"
    with HubServer(restartable_url, "127.0.0.1:0") as hub, LeaseQueue.open(url) as queue:
        address = f"127.0.0.1:{hub.port}"
        seen: list[int] = []
        follower = follow_hub(address, patience=60)
        following = threading.Thread(target=lambda: seen.extend(each.position for each in follower.events()))
        following.start()
        relay = Relay(queue, HubSink(address, source="a"), rules=RULES, interval=0.01)
        try:
            with relay:
                with working(url):
                    until(lambda: len(seen) > 100, relay.status)
                    go_and_come_back(own_server, leave, lambda: relay.status()[0].state == "retrying")
                head = queue.stats().head
                assert relay.wait_until(head, 60), relay.status()
            assert list(read_hub(address, "a").read()) == list(each_event(queue))
            until(lambda: len(seen) >= head)
            assert seen == list(range(1, head + 1))
        finally:
            follower.close()
            following.join(30)


@pytest.mark.parametrize("on_server", ["primary", "copy", "both"])
def test_a_standby_goes_on(
    on_server: str,
    own_server: PostgresServer,
    leave: Callable[[], None],
    restartable_url: str,
    other_url: str,
    tmp_path: Path,
) -> None:
    primary_url = f"sqlite:///{tmp_path}/primary.db" if on_server == "copy" else restartable_url
    copy_url = f"sqlite:///{tmp_path}/copy.db" if on_server == "primary" else other_url
    with (
        LeaseQueue.open(primary_url, config=IMPATIENT) as primary,
        Standby(primary, copy_url, config=IMPATIENT, interval=0.02) as standby,
    ):
        standby.start()
        with working(primary_url):
            until(lambda: standby.number > 100, lambda: standby.trouble)
            go_and_come_back(own_server, leave, lambda: standby.trouble is not None)
        until(lambda: standby.lag() == 0, lambda: standby.trouble)
        until(lambda: set(primary.readers().values()) == {standby.number}, primary.readers)
        with standby.promote(primary) as queue:
            same(primary, queue)
            work(queue, 10)


def test_a_standby_of_a_copy_goes_on(
    own_server: PostgresServer, leave: Callable[[], None], restartable_url: str, tmp_path: Path
) -> None:
    """It follows a table of events, whose errors are not the queue's."""
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        relay = Relay(queue, SqlSink(restartable_url), rules=RULES)
        work(queue, 100)
        relay.run_once()
        source = read_sql(restartable_url, queue.namespace)
        with Standby(source, f"sqlite:///{tmp_path}/copy.db", interval=0.02) as standby:
            standby.start()
            until(lambda: standby.number == 300, lambda: standby.trouble)
            go_and_come_back(own_server, leave, lambda: standby.trouble is not None)
            work(queue, 100)
            until(lambda: relay.run_once()[0].position == 600, relay.status)
            until(lambda: standby.number == 600, lambda: standby.trouble)
            with standby.promote(queue) as promoted:
                same(queue, promoted)
        relay.stop()


def test_the_standby_command_waits_for_a_primary_that_is_away(
    own_server: PostgresServer, restartable_url: str, tmp_path: Path
) -> None:
    with LeaseQueue.open(restartable_url, "landing") as queue:
        head = work(queue, 5)
    copy, told = f"sqlite:///{tmp_path}/copy.db", tmp_path / "told"
    arguments = [sys.executable, "-m", "lease_core.cli", "standby", restartable_url, copy, "--namespace", "landing"]
    own_server.stop()
    try:
        with told.open("wb") as log:
            following = subprocess.Popen(arguments, stderr=log)
        until(lambda: "next try in" in told.read_text() or following.poll() is not None, told.read_text)
    finally:
        own_server.start()
    try:
        until(lambda: following.poll() is not None or _head(copy) == head, told.read_text)
    finally:
        following.terminate()
    assert following.wait(30) == 0, told.read_text()


def _head(url: str) -> int:
    if not Path(url.removeprefix("sqlite:///")).exists():
        return 0
    with LeaseQueue.open(url, "landing") as copy:
        return copy.stats().head
