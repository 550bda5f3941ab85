"""kill -9 of the hub at random, and a network that is cut: every event is there exactly once, in order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.replication import Backoff, HubSink, Relay, Rules, each_event, follow_hub, read_hub
from tests.environment.proxy import Line, Proxy
from tests.replication.conftest import work
from tests.replication_hub.hub_process import HubProcess

RULES = Rules(batch_size=50, backoff=Backoff(0.02, 0.2))


class Source:
    """A queue, and the relay that delivers what it does to the hub."""

    def __init__(self, folder: Path, name: str, address: str, timeout: float = 30.0) -> None:
        self.name = name
        self.queue = LeaseQueue.open(f"sqlite:///{folder}/{name}.db")
        sink = HubSink(address, source=name, timeout=timeout)
        self.relay = Relay(self.queue, sink, rules=RULES, interval=0.01)
        self._busy = threading.Thread()
        self.relay.start()

    def produce(self, items: int) -> None:
        self._busy = threading.Thread(target=work, args=(self.queue, items))
        self._busy.start()

    def join(self) -> None:
        self._busy.join(60)

    def position(self) -> int:
        return self.relay.status()[0].position or 0

    def finish(self, address: str, timeout: float) -> int:
        """Wait until all is delivered and compare what the hub has; gives how many events that are."""
        head = self.queue.stats().head
        assert self.relay.wait_until(head, timeout), self.relay.status()
        assert [each.state for each in self.relay.status()] == ["running"]
        assert list(each_event(read_hub(address, self.name))) == list(each_event(self.queue))
        return head

    def close(self) -> None:
        self.relay.stop()
        self.queue.close()


def disturb(sources: list[Source], items: int, times: int, act: Callable[[], None]) -> None:
    """Do ``act`` so many times, each at a random moment after something was delivered, with more on its way."""
    chance = random.Random(items)
    for _ in range(times):
        before = sum(each.position() for each in sources)
        for each in sources:
            each.produce(items)
        deadline = time.monotonic() + 60
        while sum(each.position() for each in sources) <= before:
            assert time.monotonic() < deadline, [each.relay.status() for each in sources]
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.1))
        act()
        for each in sources:
            each.join()


def kill_at_random(hub: HubProcess, tmp_path: Path, sources: int, items: int, kills: int) -> None:
    running = [Source(tmp_path, f"s{number}", hub.address) for number in range(sources)]
    seen: list[int] = []
    follower = follow_hub(hub.address, patience=120)
    following = threading.Thread(target=lambda: seen.extend(each.position for each in follower.events()))
    following.start()

    def kill() -> None:
        hub.kill()
        hub.start()

    try:
        disturb(running, items, kills, kill)
        total = sum(each.finish(hub.address, 120 + items * kills / 50) for each in running)
        assert total == 3 * items * kills * sources
        merged = list(follow_hub(hub.address).events(once=True))
        assert [each.position for each in merged] == list(range(1, total + 1))
        deadline = time.monotonic() + 60
        while len(seen) < total and time.monotonic() < deadline:
            time.sleep(0.02)
        assert seen == list(range(1, total + 1))
    finally:
        follower.close()
        following.join(30)
        for each in running:
            each.close()


def test_every_event_is_there_once_however_often_the_hub_is_killed(hub_process: HubProcess, tmp_path: Path) -> None:
    kill_at_random(hub_process, tmp_path, sources=3, items=200, kills=3)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
def test_the_same_with_a_hundred_thousand_events(hub_process: HubProcess, tmp_path: Path) -> None:
    kill_at_random(hub_process, tmp_path, sources=4, items=280, kills=30)


def test_a_network_that_is_cut_again_and_again_loses_nothing(hub_process: HubProcess, tmp_path: Path) -> None:
    with Proxy("127.0.0.1", hub_process.port) as proxy:
        source = Source(tmp_path, "a", f"127.0.0.1:{proxy.port}")
        try:
            disturb([source], 200, 5, proxy.cut_all)
            source.finish(hub_process.address, 60)
        finally:
            source.close()


def test_an_answer_that_is_lost_does_not_store_twice(hub_process: HubProcess, tmp_path: Path) -> None:
    """The hub has stored the batch when the line is cut before its answer gets through."""
    with Proxy("127.0.0.1", hub_process.port) as proxy:
        source = Source(tmp_path, "a", f"127.0.0.1:{proxy.port}")
        held = read_hub(hub_process.address, "a")
        lost = 0

        def lose(line: Line, data: bytes) -> bool:
            nonlocal lost
            known = source.position()
            if lost < 3 and known > 100 * lost and held.events(known, 1):
                lost += 1
                line.cut()
                return True
            return False

        proxy.on_answer = lose
        try:
            source.produce(300)
            source.join()
            source.finish(hub_process.address, 60)
            assert lost == 3
        finally:
            source.close()


def test_a_network_that_goes_silent_is_noticed_and_loses_nothing(hub_process: HubProcess, tmp_path: Path) -> None:
    with Proxy("127.0.0.1", hub_process.port) as proxy:
        source = Source(tmp_path, "a", f"127.0.0.1:{proxy.port}", timeout=0.5)

        def silence() -> None:
            proxy.freeze()
            source.join()
            source.produce(100)
            deadline = time.monotonic() + 30
            while source.relay.status()[0].state != "retrying":
                assert time.monotonic() < deadline, source.relay.status()
                time.sleep(0.01)
            proxy.cut_all()
            proxy.thaw()

        try:
            disturb([source], 100, 2, silence)
            source.finish(hub_process.address, 60)
        finally:
            source.close()
