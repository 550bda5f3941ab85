"""A hub that lets go of old events: never of what a cursor waits for, and never so that it passes for damage."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.replication import HubServer, HubSink, Relay, Rules, follow_hub, read_hub
from lease_core.replication.hub.store import HubStore
from tests.replication.conftest import work
from tests.replication_hub.batches import AT, batch, publish

LATER = AT + timedelta(days=1)


def fill(address: str) -> None:
    for source in "ab":
        publish(address, [batch(1, 10, source=source), batch(11, 20, source=source)])


def prune(url: str, before: datetime = LATER) -> int:
    store = HubStore(url)
    try:
        return store.prune(before)
    finally:
        store.close()


def test_what_every_cursor_has_passed_goes_and_readers_are_told(hub_url: str, address: str) -> None:
    fill(address)
    reader = follow_hub(address, "slow")
    reader.keep(5)
    assert prune(hub_url) == 0, "the first batch is needed still"
    reader.keep(25)
    assert prune(hub_url, AT) == 0, "nothing is from before that"
    assert prune(hub_url) == 20
    assert [each.position for each in reader.events(once=True)] == list(range(26, 41))
    for read, oldest in (
        (lambda: list(follow_hub(address).events(once=True)), 21),
        (lambda: list(follow_hub(address).events(19, once=True)), 21),
        (lambda: list(read_hub(address, "a", "n").read()), 21),
        (lambda: list(read_hub(address, "a", "n").read(15)), 21),
    ):
        with pytest.raises(EventsPruned) as gap:
            read()
        assert gap.value.oldest == oldest
    assert [each.position for each in follow_hub(address).events(20, once=True)] == list(range(21, 41))
    assert len(list(read_hub(address, "b", "n").read())) == 20
    assert list(read_hub(address, "a", "n").read(20)) == []


def test_sources_notice_nothing(hub_url: str, address: str) -> None:
    fill(address)
    assert prune(hub_url) == 40
    outcomes = publish(address, [batch(15, 20), batch(1, 25), batch(26, 30), batch(40, 41), batch(25, 26, salt="x")])
    assert [(outcome, upto) for outcome, upto, _ in outcomes] == [
        ("STORED", 21), ("STORED", 26), ("STORED", 31), ("MISSING", 31), ("REWRITES_HISTORY", 31),
    ]  # fmt: skip
    assert [event.sequence_number for event in read_hub(address, "a", "n").read(20)] == list(range(21, 31))


def test_a_relay_goes_on_at_a_hub_that_has_let_go_of_all_it_had(hub_url: str, address: str, tmp_path: Path) -> None:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        for upto in (150, 300):
            work(queue, 50)
            relay = Relay(queue, HubSink(address, source="a"), rules=Rules(batch_size=20))
            [status] = relay.run_once()
            relay.stop()
            assert (status.state, status.position) == ("running", upto)
            assert prune(hub_url, datetime.now(UTC) + timedelta(days=1)) == upto


def test_the_server_does_it_by_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/hub.db"
    with (
        LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue,
        HubServer(url, "127.0.0.1:0", keep_days=1e-9) as hub,
    ):
        address = f"127.0.0.1:{hub.port}"
        work(queue, 10)
        Relay(queue, HubSink(address, source="a")).run_once()
        deadline = time.monotonic() + 30
        while (oldest := _oldest(address)) == 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert oldest == 31


def _oldest(address: str) -> int:
    try:
        list(follow_hub(address).events(once=True))
    except EventsPruned as gap:
        return gap.oldest
    return 1
