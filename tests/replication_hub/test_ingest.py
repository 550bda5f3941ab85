"""What the hub takes, what it asks for and what it refuses, on both databases."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from lease_core import LeaseEvent, LeaseQueue, WorkItem
from lease_core.replication import (
    Backoff,
    Batch,
    HistoryDiffers,
    HubServer,
    HubSink,
    RefusedEvents,
    RefusedForGood,
    Relay,
    Rules,
    SinkUnavailable,
    each_event,
    follow_hub,
    read_hub,
    with_shard,
)
from lease_core.replication.hub.schema import batches as stored
from tests.replication.conftest import work
from tests.replication_hub.batches import batch, events, publish


def held(address: str, source: str = "a", namespace: str = "n") -> list[LeaseEvent]:
    return list(each_event(read_hub(address, source, namespace)))


def rows(url: str) -> int:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = connection.scalar(sa.select(sa.func.count()).select_from(stored))
    engine.dispose()
    return int(found or 0)


def test_a_relay_copies_a_queue_and_the_copy_reads_back(address: str, hub_url: str, tmp_path: Path) -> None:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        head = work(queue, 500)
        relay = Relay(queue, HubSink(address, source="eu-1"), rules=Rules(batch_size=100))
        [status] = relay.run_once()
        relay.stop()
        assert (status.state, status.position, status.delivered) == ("running", head, head)
        copy = read_hub(address, "eu-1")
        assert list(each_event(copy, page=70)) == list(each_event(queue))
        assert [event.sequence_number for event in copy.events(250, 3)] == [251, 252, 253]
        assert copy.events(head, 10) == []
        assert sum(seal.count for seal in copy.seals()) == head
    assert rows(hub_url) == head // 100


def test_what_comes_again_is_there_once_however_it_is_cut(address: str) -> None:
    assert [answer[:2] for answer in publish(address, [batch(1, 10), batch(11, 20)])] == [
        ("STORED", 11),
        ("STORED", 21),
    ]
    again = [batch(1, 10), batch(1, 20), batch(5, 15), batch(20, 20), batch(7, 25), batch(1, 30)]
    assert [answer[:2] for answer in publish(address, again)] == [
        ("STORED", 21), ("STORED", 21), ("STORED", 21), ("STORED", 21), ("STORED", 26), ("STORED", 31),
    ]  # fmt: skip
    assert held(address) == events(1, 30)
    assert [each.position for each in follow_hub(address).events(once=True)] == list(range(1, 31))


def test_the_order_of_fields_is_not_history(address: str) -> None:
    publish(address, [batch(1, 3)])
    turned = b"".join(
        json.dumps(dict(reversed(json.loads(line).items()))).encode() + b"\n" for line in batch(1, 3).lines.splitlines()
    )
    assert publish(address, [batch(1, 3, lines=turned)])[0][:2] == ("STORED", 4)


def test_a_gap_is_found_and_what_is_missing_asked_for(address: str) -> None:
    answers = publish(address, [batch(5, 9), batch(1, 4), batch(8, 9), batch(5, 9)])
    assert [answer[:2] for answer in answers] == [("MISSING", 1), ("STORED", 5), ("MISSING", 5), ("STORED", 10)]
    assert "5 to 7" in answers[2][2]
    assert held(address) == events(1, 9)


def test_a_relay_goes_back_to_what_the_hub_asks_for(hub_url: str, tmp_path: Path) -> None:
    """A hub that was restored from an older backup has forgotten events that it had acknowledged."""
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        work(queue, 20)
        with HubServer(hub_url, "127.0.0.1:0") as hub:
            sink = HubSink(f"127.0.0.1:{hub.port}", source="a")
            relay = Relay(queue, sink, rules=Rules(batch_size=10), interval=0.01).start()
            assert relay.wait_until(60, 30)
            with sa.create_engine(hub_url).begin() as connection:
                connection.execute(sa.text("DELETE FROM omnirelay_hub_batch WHERE last > 30"))
                digest = "(SELECT sha256 FROM omnirelay_hub_batch WHERE last = 30)"
                connection.execute(sa.text(f"UPDATE omnirelay_hub_stream SET last = 30, sha256 = {digest}"))
                connection.execute(sa.text("UPDATE omnirelay_hub_head SET position = 30"))
            head = work(queue, 20)
            assert relay.wait_until(head, 30)
            relay.stop()
            assert held(f"127.0.0.1:{hub.port}", "a", "resourcelease") == list(each_event(queue))


def test_a_copy_begins_at_the_first_event_unless_it_may_begin_late(address: str) -> None:
    late = Batch(events(7, 9))
    with pytest.raises(SinkUnavailable, match="from 1 on"):
        HubSink(address, source="a").deliver(late)
    sink = HubSink(address, source="a", begin_late=True)
    assert sink.position("n") == 0
    sink.deliver(late)
    assert sink.position("n") == 9
    assert held(address) == events(7, 9)
    assert publish(address, [batch(3, 12)])[0] == ("INVALID", 10, "the hub's copy begins at event 7")
    assert publish(address, [batch(11, 12, begins=True)])[0][:2] == ("MISSING", 10)


def test_a_relay_that_begins_late_is_told_what_to_set(address: str, tmp_path: Path) -> None:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        before = work(queue, 2)
        rules = Rules(start="end", backoff=Backoff(1e-9, 1e-9))
        Relay(queue, HubSink(address, source="a"), rules=rules).run_once()
        head = work(queue, 1)
        [status] = Relay(queue, HubSink(address, source="a"), rules=rules).run_once()
        assert status.state == "retrying"
        assert f"got {before + 1}: let the sink begin_late" in str(status.error)
        [late] = Relay(queue, HubSink(address, source="a", begin_late=True), rules=rules).run_once()
        assert (late.state, late.position) == ("running", head)
        whole = HubSink(address, source="b", name="whole")
        assert Relay(queue, whole, rules=rules).run_once()[0].position == head
        work(queue, 1)
        [other] = Relay(queue, whole, rules=Rules(start="beginning")).run_once()
        assert (other.state, other.position) == ("running", head + 3)
        assert held(address, "b", "resourcelease") == list(each_event(queue))


def test_a_source_that_rewrites_history_is_refused_and_the_hub_keeps_what_it_has(address: str) -> None:
    publish(address, [batch(1, 10), batch(11, 20)])
    for first, last in ((1, 10), (1, 25), (10, 11), (20, 21), (3, 3)):
        [(outcome, following, reason)] = publish(address, [batch(first, last, salt="!")])
        assert (outcome, following) == ("REWRITES_HISTORY", 21)
        assert f"event {first} of a" in reason
    with pytest.raises(HistoryDiffers, match="another event 18"):
        HubSink(address, source="a").deliver(Batch(events(15, 17) + events(18, 22, salt="!")))
    assert held(address) == events(1, 20)
    assert publish(address, [batch(21, 21)])[0][:2] == ("STORED", 22)


@pytest.mark.parametrize("items", [10, 30])
def test_a_relay_of_a_queue_made_anew_stops_and_says_why(address: str, tmp_path: Path, items: int) -> None:
    """Also if nothing of the new queue has a number that the hub holds, as when it has grown past the old one."""
    found = []
    for number, size in enumerate((10, items)):
        with LeaseQueue.open(f"sqlite:///{tmp_path}/queue{number}.db") as queue:
            work(queue, size)
            relay = Relay(queue, with_shard(HubSink(address, source="a"), "eu-1"), rules=Rules(batch_size=9))
            [status] = relay.run_once()
            relay.stop()
            found.append((status.state, status.error, list(each_event(queue))))
    assert found[0][0] == "running"
    assert found[1][0] == "stopped"
    assert "the hub holds another event 30 of a" in str(found[1][1])
    assert [event.token for event in held(address, "a", "resourcelease")] == [event.token for event in found[0][2]]


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (batch(1, 3, namespace=""), "namespace:"),
        (batch(1, 3, namespace="n\x00"), "namespace:"),
        (batch(1, 3, first=0, last=2), "first, last:"),
        (batch(1, 3, first=3, last=1), "first, last:"),
        (batch(1, 3, last=4), "lines: 4 are needed"),
        (batch(1, 3, lines=b""), "lines: 3 are needed"),
        (batch(1, 2, lines=batch(1, 2).lines[:-1]), "lines: 2 are needed"),
        (batch(1, 3, lines=b"\n\n\n"), "not an event"),
        (batch(1, 3, lines=batch(2, 4).lines), "event 2 of n stands where 1 should"),
        (batch(1, 3, lines=batch(1, 3, namespace="m").lines), "event 1 of m stands where 1 should"),
        (batch(1, 2, lines=batch(1, 1).lines + b'{"namespace": 7}\n'), "not an event"),
        (batch(1, 2, lines=batch(1, 2).lines.replace(b"\n", b"", 1) + b"\n"), "not an event"),
        (batch(1, 2, lines=b"\n" + batch(1, 2).lines.replace(b"\n", b"", 1)), "not an event"),
        (batch(1, 2, lines=batch(1, 2).lines.replace(b"\n", b"", 1).replace(b',"', b',\n"', 1)), "not an event"),
        (batch(1, 1, lines=batch(1, 1).lines[:-2] + b',"x":' + b"[" * 100_000 + b"}\n"), "not an event"),
        (batch(1, 1, lines=batch(1, 1).lines.replace(b'"namespace":"n",', b"")), "not an event"),
        (batch(1, 1, lines=batch(1, 1).lines.replace(b'"type":', b'"kind":')), "not an event"),
        (batch(1, 1, lines=batch(1, 1).lines.replace(b"2026", b"soon")), "not an event"),
        (batch(1, 2, lines=batch(1, 2).lines.replace(b',"', b',\n"', 1)[:-1]), "lines: 2 are needed"),
        (batch(1, 2, lines=batch(1, 1).lines.replace(b',"', b',\n"', 1)), "not an event"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_that_is_not_what_it_says_is_refused(sqlite_hub: HubServer, offered: object, said: str) -> None:
    address = f"127.0.0.1:{sqlite_hub.port}"
    [(outcome, _, reason), (after, following, _)] = publish(address, [offered, batch(1, 1)])  # type: ignore[list-item]
    assert outcome == "INVALID"
    assert said in reason
    assert (after, following) == ("STORED", 2)


def test_an_event_too_large_for_the_hub_is_refused_and_smaller_batches_are_not(tmp_path: Path) -> None:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0", most_bytes=20_000) as hub:
        sink = HubSink(f"127.0.0.1:{hub.port}", source="a")
        assert sink.position("n") == 0
        with pytest.raises(RefusedForGood, match="20000 bytes"):
            sink.deliver(Batch(events(1, 500)))
        with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
            head = work(queue, 100)
            [status] = Relay(queue, sink).run_once()
            assert status.position == head


def test_a_copy_without_the_event_that_was_refused_goes_no_further(tmp_path: Path) -> None:
    """The relay is to skip it, but the hub keeps no copy with a gap: that is said once, not tried for ever."""
    refused = RefusedEvents(tmp_path / "refused.jsonl")
    with (
        HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0", most_bytes=2_048) as hub,
        LeaseQueue.open("sqlite://", "main") as queue,
    ):
        for body in (b"", b"x" * 3_000, b""):
            queue.enqueue(WorkItem("file", "a", body=body))
        sink = HubSink(f"127.0.0.1:{hub.port}", source="here")
        relay = Relay(queue, sink, rules=Rules(on_refusal="skip", backoff=Backoff(0.001, 0.01)), refused=refused)
        for _ in range(5):
            [status] = relay.run_once()
        relay.stop()
        assert (status.state, status.refused) == ("stopped", 1)
        assert "refused event 2" in str(status.error)
        assert [each.event.sequence_number for each in refused] == [2]


def test_many_sources_at_once_each_come_through_whole(address: str) -> None:
    sources = [f"source-{number}" for number in range(12)]

    def run(source: str) -> None:
        sink = HubSink(address, source=source)
        for first in range(1, 400, 20):
            sink.deliver(Batch(events(first, first + 19, salt=source)))
        sink.close()

    with ThreadPoolExecutor(len(sources)) as pool:
        list(pool.map(run, sources))
    for source in sources:
        assert held(address, source) == events(1, 400, salt=source)
    merged = list(follow_hub(address).events(once=True))
    assert [each.position for each in merged] == list(range(1, 12 * 400 + 1))
    for source in sources:
        assert [each.event for each in merged if each.source == source] == events(1, 400, salt=source)


def test_two_writers_of_the_same_source_make_one_history(address: str) -> None:
    def run(size: int) -> None:
        sink = HubSink(address, source="a")
        for first in range(1, 200, size):
            sink.deliver(Batch(events(first, min(200, first + size - 1))))
        sink.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, (10, 7, 13, 10)))
    assert held(address) == events(1, 200)


def test_two_hubs_share_a_database(hub_url: str) -> None:
    with HubServer(hub_url, "127.0.0.1:0") as one, HubServer(hub_url, "127.0.0.1:0") as two:
        addresses = [f"127.0.0.1:{each.port}" for each in (one, two)]
        for first in range(1, 60, 3):
            assert publish(addresses[first % 2], [batch(first, first + 2)])[0][:2] == ("STORED", first + 3)
        assert publish(addresses[0], [batch(58, 60, salt="!")])[0][0] == "REWRITES_HISTORY"
        assert held(addresses[0]) == held(addresses[1]) == events(1, 60)


def test_what_the_hub_cannot_store_is_not_acknowledged_and_comes_through_later(hub_url: str) -> None:
    with HubServer(hub_url, "127.0.0.1:0") as hub:
        address = f"127.0.0.1:{hub.port}"
        publish(address, [batch(1, 5)])
        engine = sa.create_engine(hub_url)
        with engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE omnirelay_hub_batch RENAME TO away"))
        [(outcome, _, reason)] = publish(address, [batch(6, 9)])
        assert outcome == "UNAVAILABLE"
        assert "cannot store" in reason
        with engine.begin() as connection:
            connection.execute(sa.text("ALTER TABLE away RENAME TO omnirelay_hub_batch"))
        engine.dispose()
        assert publish(address, [batch(6, 9)])[0][:2] == ("STORED", 10)
        assert held(address) == events(1, 9)
