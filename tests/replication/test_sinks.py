"""Every sink, against the real thing: all events, in order, once; copies read back equal; repeating changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from lease_core import LeaseEvent, LeaseQueue
from lease_core.deterministic import StateStore
from lease_core.errors import InvalidInput
from lease_core.replication import (
    Backoff,
    Batch,
    EventSource,
    FileCheckpoints,
    HistoryDiffers,
    HttpSink,
    JsonlSink,
    MemorySink,
    NatsSink,
    ObjectStoreSink,
    OpenLineageSink,
    RefusedEvents,
    Relay,
    Rules,
    Sink,
    SqlSink,
    decode_event,
    each_event,
    encode_event,
    fan_out,
    read_jsonl,
    read_segments,
    read_sql,
    with_shard,
)
from lease_core.replication.errors import CorruptCopy
from tests.replication.conftest import work
from tests.replication.test_relay import Plain
from tests.servers.nats import NatsServer

Made = tuple[Callable[[], Sink], Callable[[], Iterable[LeaseEvent]]]


async def _messages(url: str, stream: str) -> list[LeaseEvent]:
    connection = await nats.connect(url)
    try:
        jetstream = connection.jetstream()
        info = await jetstream.stream_info(stream)
        reader = await jetstream.pull_subscribe(
            (info.config.subjects or [""])[0], stream=stream, config=ConsumerConfig(ack_policy=AckPolicy.NONE)
        )
        found: list[LeaseEvent] = []
        while len(found) < info.state.messages:
            found.extend(decode_event(message.data) for message in await reader.fetch(500, timeout=10))
        return found
    finally:
        await connection.close()


def messages(url: str, stream: str) -> list[LeaseEvent]:
    return asyncio.run(_messages(url, stream))


def close(sink: Any) -> None:
    if hasattr(sink, "close"):
        sink.close()


@pytest.fixture(params=["memory", "jsonl", "local", "s3", "gcs", "sqlite", "postgres", "http", "nats"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A way to make the sink, and one to read what it holds."""

    def reading(source: Callable[[], EventSource]) -> Callable[[], Iterable[LeaseEvent]]:
        return lambda: each_event(source(), page=70)

    match request.param:
        case "memory":
            sink = MemorySink()
            return (lambda: sink), (lambda: sink.kept)
        case "jsonl":
            return (lambda: JsonlSink(tmp_path / "jsonl", max_bytes=20_000)), reading(
                lambda: read_jsonl(tmp_path / "jsonl")
            )
        case "local":
            url = f"file://{tmp_path}/a b/objects"
            return (lambda: ObjectStoreSink(url)), reading(lambda: read_segments(url))
        case "s3" | "gcs":
            bucket = request.getfixturevalue("bucket" if request.param == "s3" else "gcs_bucket")
            return (lambda: ObjectStoreSink(**bucket())), reading(lambda: read_segments(**bucket()))
        case "sqlite":
            url = f"sqlite:///{tmp_path}/copy.db"
            return (lambda: SqlSink(url)), reading(lambda: read_sql(url, "resourcelease"))
        case "postgres":
            url = request.getfixturevalue("postgres_url")
            return (lambda: SqlSink(url)), reading(lambda: read_sql(url, "resourcelease"))
        case "http":
            server = request.getfixturevalue("endpoint")
            return (lambda: HttpSink(server.url)), (
                lambda: [decode_event(json.dumps(event)) for event in server.events]
            )
        case _:
            url, stream = request.getfixturevalue("nats_server").url, f"S{uuid.uuid4().hex[:8]}"
            return (lambda: NatsSink(url, stream=stream, subject=stream)), (
                lambda: messages(url, f"{stream}_resourcelease")
            )


def test_a_sink_ends_up_with_the_log(made: Made, queue: LeaseQueue) -> None:
    make, read = made
    work(queue, 150)
    for _ in range(2):  # a second relay goes on where the first one was
        relay = Relay(queue, make(), rules=Rules(batch_size=64, linger=0))
        assert [(each.state, each.error) for each in relay.run_once()] == [("running", None)]
        relay.stop()
        assert list(read()) == list(each_event(queue))
        work(queue, 30)


def test_what_comes_again_is_not_there_twice(made: Made, queue: LeaseQueue) -> None:
    make, read = made
    work(queue, 20)
    events = queue.events()
    sink = make()
    for start, end in ((0, 10), (0, 10), (5, 15), (12, 14), (14, 60)):
        sink.deliver(Batch(events[start:end]))
    again = make()
    close(sink)
    again.deliver(Batch(events[30:]))
    assert list(read()) == events
    close(again)


def test_a_gap_is_not_papered_over(made: Made, queue: LeaseQueue) -> None:
    make, _ = made
    sink = make()
    if isinstance(sink, MemorySink | HttpSink | NatsSink):
        pytest.skip("capability: keeps no chain of its own")
    work(queue, 10)
    events = queue.events()
    sink.deliver(Batch(events[:5]))
    with pytest.raises(HistoryDiffers):
        sink.deliver(Batch(events[7:9]))
    sink.deliver(Batch(events[5:]))
    close(sink)


# Object store


@pytest.mark.parametrize("store", ["bucket", "gcs_bucket"])
def test_of_two_relays_at_once_the_store_keeps_one_chain(
    store: str, request: pytest.FixtureRequest, queue: LeaseQueue
) -> None:
    bucket: Callable[[], dict[str, Any]] = request.getfixturevalue(store)
    work(queue, 100)
    events = queue.events()
    from concurrent.futures import ThreadPoolExecutor

    def write(size: int) -> None:
        sink = ObjectStoreSink(**bucket())
        for start in range(0, len(events), size):
            sink.deliver(Batch(events[start : start + size]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, (7, 11, 13, 20)))
    assert list(each_event(read_segments(**bucket()))) == events


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_of_two_that_write_to_one_table_each_goes_on_after_the_other(
    database: str, request: pytest.FixtureRequest, tmp_path: Path, queue: LeaseQueue
) -> None:
    work(queue, 20)
    events = queue.events()
    url = f"sqlite:///{tmp_path}/copy.db" if database == "sqlite" else request.getfixturevalue("postgres_url")
    one, other = SqlSink(url), SqlSink(url)
    one.deliver(Batch(events[:10]))
    other.deliver(Batch(events[:30]))
    one.deliver(Batch(events[10:40]))  # which it thinks is next
    other.deliver(Batch(events[30:35]))
    other.deliver(Batch(events[35:]))
    assert list(each_event(read_sql(url, "resourcelease"))) == events
    assert one.position("resourcelease") == other.position("resourcelease") == len(events)
    for sink in (one, other):
        sink.close()


def test_keys_sort_by_sequence_and_lie_below_the_prefix(tmp_path: Path, queue: LeaseQueue) -> None:
    work(queue, 50)
    events = queue.events()
    sink = ObjectStoreSink(f"file://{tmp_path}/deep/er")
    for start in range(0, 150, 50):
        sink.deliver(Batch(events[start : start + 50]))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl"))
    assert found == [f"deep/er/resourcelease/{first:020d}.jsonl" for first in (1, 51, 101)]


def test_a_missing_or_foreign_segment_is_found(tmp_path: Path, queue: LeaseQueue) -> None:
    work(queue, 50)
    events = queue.events()
    sink = ObjectStoreSink(f"file://{tmp_path}/o")
    for start in range(0, 150, 30):
        sink.deliver(Batch(events[start : start + 30]))
    copy = read_segments(f"file://{tmp_path}/o")
    one, two, three, *_ = sorted((tmp_path / "o").rglob("*.jsonl"))
    kept = three.read_bytes()
    three.write_bytes(two.read_bytes())
    with pytest.raises(CorruptCopy) as swapped:
        list(copy.read())
    assert swapped.value.first_bad == 61
    three.unlink()
    with pytest.raises(CorruptCopy, match="events 61 to 90 are missing"):
        list(copy.read())
    three.write_bytes(kept)
    one.unlink()  # archived elsewhere: a copy may begin late
    assert list(copy.read(30)) == events[30:]


# NATS


def test_jetstream_has_each_event_once_also_past_its_window_of_duplicates(
    nats_server: NatsServer, queue: LeaseQueue
) -> None:
    work(queue, 20)
    events = queue.events()
    stream = f"S{uuid.uuid4().hex[:8]}"

    async def make_stream() -> None:
        connection = await nats.connect(nats_server.url)
        jetstream = connection.jetstream()
        await jetstream.add_stream(
            name=f"{stream}_resourcelease", subjects=[f"{stream}.resourcelease"], duplicate_window=0.1
        )
        await connection.close()

    asyncio.run(make_stream())
    for end in (10, 30, 60):
        sink = NatsSink(nats_server.url, stream=stream, subject=stream)
        sink.deliver(Batch(events[:end]))
        sink.close()
    assert messages(nats_server.url, f"{stream}_resourcelease") == events


def test_a_killed_server_is_caught_up_with(tmp_path: Path, queue: LeaseQueue) -> None:
    head = work(queue, 60)
    with NatsServer(tmp_path / "nats") as server:
        relay = Relay(queue, NatsSink(server.url, timeout=5), rules=Rules(batch_size=20))
        relay.run_once(3)
        server.kill()
        relay.run_once()
        [down] = relay.status()
        assert (down.state, down.position) == ("retrying", 60)
        server.start()
        with relay:
            assert relay.wait_until(head, 30)
        assert messages(server.url, "OMNIRELAY_resourcelease") == list(each_event(queue))


def test_another_event_under_the_last_number_of_a_stream_is_not_taken_for_it(
    nats_server: NatsServer, queue: LeaseQueue, tmp_path: Path
) -> None:
    work(queue, 2)
    stream = f"S{uuid.uuid4().hex[:8]}"
    with LeaseQueue.open(f"sqlite:///{tmp_path}/anew.db") as anew:
        work(anew, 4)
        others = anew.events()
    sink = NatsSink(nats_server.url, stream=stream, subject=stream)
    with_shard(sink, "eu-1").deliver(Batch(queue.events()))
    sink.deliver(Batch(queue.events()))  # a shard makes no other event of it
    with pytest.raises(HistoryDiffers, match="another event 6 than the log"):
        sink.deliver(Batch(others))
    sink.close()
    assert len(messages(nats_server.url, f"{stream}_resourcelease")) == 6


def test_a_stream_that_was_emptied_does_not_swallow_what_another_queue_sends(
    nats_server: NatsServer, queue: LeaseQueue, tmp_path: Path
) -> None:
    work(queue, 1)
    stream = f"S{uuid.uuid4().hex[:8]}"
    whole = f"{stream}_resourcelease"

    async def management(call: str) -> None:
        connection = await nats.connect(nats_server.url)
        await getattr(connection.jetstream(), call)(whole)
        await connection.close()

    sink = NatsSink(nats_server.url, stream=stream, subject=stream)
    Relay(queue, sink).run_once()
    asyncio.run(management("purge_stream"))  # which does not make the server forget the numbers
    with LeaseQueue.open(f"sqlite:///{tmp_path}/anew.db") as anew:
        work(anew, 2)
        relay = Relay(anew, sink, rules=Rules(backoff=Backoff(1e-9, 1e-9)))
        for _ in range(2):
            [status] = relay.run_once()
            assert (status.state, status.delivered) == ("retrying", 0)
            assert "duplicate window" in str(status.error)
            assert messages(nats_server.url, whole) == []
        asyncio.run(management("delete_stream"))
        [status] = relay.run_once()
        relay.stop()
        assert (status.state, status.delivered) == ("running", 6)
        assert messages(nats_server.url, whole) == anew.events()


# Made of others


def test_fan_out_delivers_to_all_and_goes_by_the_one_furthest_behind(tmp_path: Path, queue: LeaseQueue) -> None:
    work(queue, 10)
    events = queue.events()
    memory, files = MemorySink(), JsonlSink(tmp_path / "j")
    memory.deliver(Batch(events[:20]))
    files.deliver(Batch(events[:4]))
    both = fan_out(memory, files)
    assert both.position("resourcelease") == 4  # type: ignore[attr-defined]
    Relay(queue, both).run_once()
    assert memory.kept == events
    assert list(read_jsonl(tmp_path / "j").read()) == events


@pytest.mark.parametrize("first", ["picky", "others"])
def test_what_one_of_several_refuses_the_others_get(tmp_path: Path, queue: LeaseQueue, first: str) -> None:
    work(queue, 10)
    events = queue.events()
    picky, plain, files = Plain("picky"), Plain(), JsonlSink(tmp_path / "j")
    picky.refuses = {1, 17, 30}
    sinks = (picky, plain, files) if first == "picky" else (files, plain, picky)
    refused = RefusedEvents(tmp_path / "refused.jsonl")
    relay = Relay(queue, fan_out(*sinks), rules=Rules(on_refusal="skip"), refused=refused)
    [status] = relay.run_once()
    relay.stop()
    assert (status.state, status.position, status.refused) == ("running", 30, 3)
    assert list(read_jsonl(tmp_path / "j").read()) == events
    assert picky.events == [event for event in events if event.sequence_number not in picky.refuses]
    if first == "picky":
        assert plain.events == events  # each once, as all before it have been asked already
    else:
        assert {event.sequence_number for event in plain.events} == {event.sequence_number for event in events}
    assert [each.event.sequence_number for each in refused] == [1, 17, 30]


def test_a_refusal_waits_until_the_others_have_the_event(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 1)
    picky, failing = Plain("picky"), Plain("failing")
    picky.refuses = {2}
    refused = RefusedEvents(tmp_path / "refused.jsonl")
    rules = Rules(batch_size=1, on_refusal="skip", backoff=Backoff(1e-9, 1e-9))
    relay = Relay(queue, fan_out(picky, failing), rules=rules, refused=refused)
    relay.run_once(1)
    failing.errors = [OSError("no")]
    [status] = relay.run_once()
    assert (status.state, status.position, list(refused)) == ("retrying", 1, [])
    [status] = relay.run_once()
    assert (status.state, status.position) == ("running", 3)
    assert [event.sequence_number for event in failing.events] == [1, 2, 3]
    assert [each.event.sequence_number for each in refused] == [2]


def test_with_shard_tags_every_event(queue: LeaseQueue) -> None:
    work(queue, 3)
    memory = MemorySink()
    Relay(queue, with_shard(memory, "eu-1")).run_once()
    assert {event.metadata["shard.id"] for event in memory.kept} == {"eu-1"}
    assert b'"shard.id":"eu-1"' in encode_event(memory.kept[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda path: HttpSink("ftp://x"),
        lambda path: ObjectStoreSink("s3://b/x", options={"allow_http": "true"}),
        lambda path: SqlSink("nonsense"),
        lambda path: ObjectStoreSink("nonsense://x"),
        lambda path: JsonlSink(path, max_bytes=0),
        lambda path: OpenLineageSink(),
        lambda path: read_jsonl(path / "nowhere"),
    ],
)
def test_a_wrong_argument_is_named(make: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        make(tmp_path)


@pytest.mark.parametrize(
    "namespace", ["a/b", "..", "a%2Fb", " x ", "ä€😀", "x?y#z", "%", "*", "日" * 60, "x" * 300], ids=len
)
def test_any_namespace_has_a_place(namespace: str, tmp_path: Path) -> None:
    """Also one whose name, written so that a path can hold it, is longer than the name of a file may be."""
    with LeaseQueue.open("sqlite://", namespace) as queue:
        head = work(queue, 5)
        objects, table = f"file://{tmp_path}/objects", f"sqlite:///{tmp_path}/table.db"
        relay = Relay(queue, [JsonlSink(tmp_path / "lines"), ObjectStoreSink(objects), SqlSink(table)])
        for _ in range(2):
            relay.run_once()
        relay.stop()
        relay = Relay(queue, ObjectStoreSink(objects), rules=Rules(linger=0))
        assert [(each.state, each.position) for each in relay.run_once()] == [("running", head)]
        for copy in (
            read_jsonl(tmp_path / "lines", namespace),
            read_segments(objects, namespace),
            read_sql(table, namespace),
        ):
            assert list(each_event(copy)) == queue.events()
        if len(namespace) < 60:
            assert read_jsonl(tmp_path / "lines").namespace == read_segments(objects).namespace == namespace
        else:
            for read in (lambda: read_jsonl(tmp_path / "lines"), lambda: read_segments(objects)):
                with pytest.raises(InvalidInput, match="say which to read"):
                    read()


def test_a_file_that_cannot_be_begun_closes_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a file that was closed may be another thread's by the time the failure is tidied up."""
    with LeaseQueue.open("sqlite://") as queue:
        work(queue, 5)
        sink = JsonlSink(tmp_path, max_bytes=1)
        sink.deliver(Batch(queue.events(0, 3)))
        (tmp_path / "resourcelease" / f"{4:020d}.jsonl").touch()
        taken: list[int] = []
        real = os.open

        def begin(path: Any, flags: int, mode: int = 0o777) -> int:
            taken.append(real(os.devnull, os.O_RDONLY))
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", begin)
        with pytest.raises(FileExistsError):
            sink.deliver(Batch(queue.events(3, 3)))
        monkeypatch.undo()
        for each in taken:
            os.close(each)
        sink.deliver(Batch(queue.events(3, 3)))  # the empty file is taken for what it is
        sink.close()
        assert list(each_event(read_jsonl(tmp_path))) == queue.events(0, 6)


def test_the_folders_of_a_copy_are_on_disk_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is only safe once its name is, and so is the folder that it is in, and so on."""
    forced: set[int] = set()
    real = os.fsync

    def force(descriptor: int) -> None:
        forced.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", force)
    with LeaseQueue.open("sqlite://", "main") as queue:
        work(queue, 5)
        told = Batch(queue.events())
        JsonlSink(tmp_path / "a" / "b").deliver(told)
        ObjectStoreSink(f"file://{tmp_path}/c/d").deliver(told)
        RefusedEvents(tmp_path / "e" / "f" / "refused").add("sink", "reason", told.events[0])
        FileCheckpoints(tmp_path / "g" / "h" / "places").register_reader("sink")
    with StateStore.open(f"file://{tmp_path}/i/j") as states:
        states.put("key", 1)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir() and path.name != "locks"]
    assert len(folders) > 10
    assert [path for path in folders if path.parent.stat().st_ino not in forced] == []
