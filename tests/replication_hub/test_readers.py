"""The merged stream: its order, cursors, slow readers and a store that is damaged."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa

from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.replication import CorruptCopy, HubServer, each_event, follow_hub, read_hub
from lease_core.replication.hub import hub_pb2, hub_pb2_grpc
from tests.replication_hub.batches import batch, events, publish
from tests.replication_hub.hub_process import HubProcess


def change(url: str, statement: str, **values: object) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        assert connection.execute(sa.text(statement), values).rowcount
    engine.dispose()


def fill(address: str) -> None:
    publish(address, [batch(1, 5), batch(1, 3, source="b"), batch(6, 9), batch(10, 10), batch(1, 2, namespace="m")])


def test_all_sources_are_merged_in_the_order_of_storing(address: str) -> None:
    fill(address)
    merged = list(follow_hub(address).events(once=True))
    assert [each.position for each in merged] == list(range(1, 16))
    assert [(each.source, each.namespace, each.event.sequence_number) for each in merged] == [
        *(("a", "n", number) for number in range(1, 6)),
        *(("b", "n", number) for number in range(1, 4)),
        *(("a", "n", number) for number in range(6, 11)),
        *(("a", "m", number) for number in (1, 2)),
    ]
    for after in range(16):
        assert list(follow_hub(address).events(after, once=True)) == merged[after:]


def test_a_reader_may_ask_for_one_source_or_namespace(address: str) -> None:
    fill(address)
    only = {
        ("b", ""): [6, 7, 8],
        ("", "m"): [14, 15],
        ("a", "n"): [1, 2, 3, 4, 5, 9, 10, 11, 12, 13],
        ("c", ""): [],
    }
    for (source, namespace), positions in only.items():
        found = follow_hub(address, source=source, namespace=namespace).events(once=True)
        assert [each.position for each in found] == positions
    assert [(each.source, each.namespace, each.last) for each in follow_hub(address).sources()] == [
        ("a", "m", 2), ("a", "n", 10), ("b", "n", 3),
    ]  # fmt: skip


def test_each_reader_has_a_cursor_of_its_own_that_never_moves_back(address: str) -> None:
    fill(address)
    one, two = follow_hub(address, "one"), follow_hub(address, "two")
    assert one.keep(9) == 9
    assert one.keep(4) == 9
    assert next(iter(one.events(once=True))).position == 10
    assert next(iter(two.events(once=True))).position == 1
    assert next(iter(one.events(3, once=True))).position == 4
    with pytest.raises(InvalidInput, match="ends at 15"):
        one.keep(16)
    with pytest.raises(InvalidInput, match="reader"):
        follow_hub(address).keep(1)


def test_a_follower_sees_what_comes_later_also_across_a_restart(hub_process: HubProcess) -> None:
    follower = follow_hub(hub_process.address)
    seen: list[int] = []
    arrived = threading.Condition()

    def follow() -> None:
        for each in follower.events():
            with arrived:
                seen.append(each.position)
                arrived.notify_all()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        for round_ in range(3):
            publish(hub_process.address, [batch(round_ * 10 + 1, round_ * 10 + 10)])
            with arrived:
                assert arrived.wait_for(lambda upto=round_ * 10 + 10: seen == list(range(1, upto + 1)), 30), seen
            if round_ == 0:
                hub_process.kill()
                hub_process.start()
            if round_ == 1:
                assert hub_process.stop() == 0
                hub_process.start()
    finally:
        follower.close()
        thread.join(30)
    assert not thread.is_alive()


def test_a_hub_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="UNAVAILABLE"):
        list(follow_hub("127.0.0.1:1", patience=0.0).events(once=True))
    with pytest.raises(StoreUnavailable, match="UNAVAILABLE"):
        read_hub("127.0.0.1:1", "a").events(0, 1)


def test_readers_who_do_not_read_cost_the_hub_next_to_nothing(tmp_path: Path) -> None:
    """A hundred megabytes wait for each of thirty readers; a hub that read ahead for them would hold gigabytes."""
    line = 10_000
    with HubProcess(f"sqlite:///{tmp_path}/hub.db", tmp_path / "hub.log") as hub:

        def large() -> object:
            for first in range(1, 10_000, 100):
                yield batch(first, first + 99, salt="x" * line)

        assert publish(hub.address, large())[-1][:2] == ("STORED", 10_001)  # type: ignore[arg-type]
        list(zip(range(2_000), follow_hub(hub.address).events(once=True), strict=False))
        before = hub.memory()
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(hub.address, options=options) for _ in range(30)]
        try:
            streams = [hub_pb2_grpc.HubStub(each).Follow(hub_pb2.FollowRequest()) for each in channels]
            for stream in streams:
                assert next(stream).position == 1
            assert publish(hub.address, [batch(10_001, 10_001)])[0][:2] == ("STORED", 10_002)
            grown = hub.memory() - before
            assert grown < 30 * 8 * (1 << 20), f"{grown >> 20} MiB"
            assert sum(run.lines.count(b"\n") for run in _until(streams[7], 10_001)) == 10_001 - 100
        finally:
            for each in channels:
                each.close()


def _until(stream: object, position: int) -> object:
    for run in stream:  # type: ignore[attr-defined]
        yield run
        if run.position + run.lines.count(b"\n") - 1 >= position:
            return


def test_what_sources_send_faster_than_the_disk_takes_is_bounded(hub_url: str) -> None:
    """The database is locked: the hub reads on from nobody once enough waits, and all is stored when it is free."""
    most = 200_000
    with HubServer(hub_url, "127.0.0.1:0", most_pending=most) as hub:
        address = f"127.0.0.1:{hub.port}"
        engine = sa.create_engine(hub_url)
        publish(address, [batch(1, 1, source="first")])
        threads = [
            threading.Thread(
                target=publish,
                args=(address, [batch(first, first + 99, source=f"s{number}") for first in range(1, 2_000, 100)]),
            )
            for number in range(8)
        ]
        with engine.connect() as connection:
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                connection.exec_driver_sql("LOCK TABLE omnirelay_hub_head")
            for thread in threads:
                thread.start()
            assert hub.writer is not None
            peak, still = 0, time.monotonic()
            while time.monotonic() - still < 0.5:  # until nothing moves any more
                if hub.writer.pending_bytes != peak:
                    peak, still = hub.writer.pending_bytes, time.monotonic()
                time.sleep(0.01)
            assert most // 2 < peak <= most
            connection.rollback()
        for thread in threads:
            thread.join()
        engine.dispose()
        for number in range(8):
            assert list(each_event(read_hub(address, f"s{number}", "n"))) == events(1, 2_000)


def test_damage_in_the_store_is_found_and_named_and_never_served(hub: HubServer, hub_url: str, address: str) -> None:
    publish(address, [batch(1, 5), batch(6, 9), batch(10, 12)])
    lines = batch(6, 9).lines.replace(b'"8"', b'"9"')
    change(hub_url, "UPDATE omnirelay_hub_batch SET lines = :lines WHERE first = 6", lines=lines)
    for read in (read_hub(address, "a", "n").read, lambda: follow_hub(address).events(once=True)):
        source = read()
        assert len(list(islice(source, 5))) == 5
        with pytest.raises(CorruptCopy, match="a/n is not what was stored") as damage:
            next(source)
        assert damage.value.first_bad == 6
    assert publish(address, [batch(13, 13)])[0][:2] == ("STORED", 14)


def test_damage_to_one_source_holds_up_no_other(hub: HubServer, hub_url: str, address: str) -> None:
    """They are stored in one commit, in which the damaged one comes again and is compared with what is there."""
    publish(address, [batch(1, 5)])
    change(hub_url, "UPDATE omnirelay_hub_batch SET lines = :lines", lines=b"\x00 not lines")
    answers = publish(address, [batch(1, 5), batch(1, 5, source="b"), batch(6, 7, source="b")])
    assert [outcome for outcome, *_ in answers] == ["UNAVAILABLE", "STORED", "STORED"]
    assert "what the hub holds of a is damaged" in answers[0][2]


def test_batches_that_are_gone_are_missed(hub: HubServer, hub_url: str, address: str) -> None:
    publish(address, [batch(1, 5), batch(6, 9), batch(10, 12)])
    change(hub_url, "DELETE FROM omnirelay_hub_batch WHERE first = 10")
    with pytest.raises(CorruptCopy, match="10 to 12 are missing"):
        read_hub(address, "a", "n").events(0, 100)
    publish(address, [batch(13, 13)])
    with pytest.raises(CorruptCopy, match="10 to 12 are missing"):
        read_hub(address, "a", "n").events(0, 100)
    with pytest.raises(CorruptCopy, match="positions 10 to 12 are missing"):
        list(follow_hub(address).events(0, once=True))
    assert len(read_hub(address, "a", "n").events(0, 9)) == 9


def test_an_event_that_its_source_wrote_wrong_is_named(address: str) -> None:
    """The hub looks at what it must know; an optional field of the wrong kind is found by whoever reads it."""
    wrong = batch(1, 5).lines.replace(b'"sequenceId":3', b'"sequenceId":"three"')
    assert publish(address, [batch(1, 5, lines=wrong)])[0][:2] == ("STORED", 6)
    with pytest.raises(CorruptCopy) as found:
        list(follow_hub(address).events(once=True))
    assert found.value.first_bad == 3
    with pytest.raises(CorruptCopy):
        read_hub(address, "a", "n").events(0, 5)
