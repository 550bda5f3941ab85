"""The relay: order, checkpoints, retries, refusals, and that one sink's trouble is its own."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lease_core import LeaseEvent, LeaseQueue, WorkItem
from lease_core.errors import EventsPruned, InvalidInput, StoreUnavailable
from lease_core.replication import (
    Backoff,
    Batch,
    FileCheckpoints,
    JsonlSink,
    MemoryCheckpoints,
    MemorySink,
    NatsSink,
    ObjectStoreSink,
    RefusedEvents,
    RefusedForGood,
    Relay,
    Rules,
    Sink,
    SinkUnavailable,
    SqlSink,
    each_event,
    read_jsonl,
    read_sql,
)
from lease_core.replication.pages import Pages
from tests.replication.conftest import work

QUICK = Backoff(0.001, 0.01)


class Plain:
    """A sink that is nothing but a name and a method, and fails as told."""

    def __init__(self, name: str = "plain", errors: Sequence[Exception] = ()) -> None:
        self.name = name
        self.batches: list[list[LeaseEvent]] = []
        self.errors = list(errors)
        self.refuses: set[int] = set()

    def deliver(self, batch: Batch) -> None:
        if self.errors:
            raise self.errors.pop(0)
        if bad := [event for event in batch if event.sequence_number in self.refuses]:
            raise RefusedForGood("not this one", bad[0].sequence_number if len(batch) > 3 else None)
        self.batches.append(list(batch))

    @property
    def events(self) -> list[LeaseEvent]:
        return [event for batch in self.batches for event in batch]


def test_events_arrive_in_order_in_batches_of_the_size_asked_for(queue: LeaseQueue) -> None:
    work(queue, 35)
    small, large = Plain("small"), Plain("large")
    Relay(queue, [small, large], rules={"small": Rules(batch_size=10), "large": Rules(batch_size=100)}).run_once()
    assert [len(batch) for batch in small.batches] == [10] * 10 + [5]
    assert [len(batch) for batch in large.batches] == [100, 5]
    assert small.events == large.events == queue.events()


def test_checkpoints_are_kept_in_the_queue_and_hold_the_log(queue: LeaseQueue) -> None:
    head = work(queue, 20)
    Relay(queue, [Plain("a"), Plain("b", [SinkUnavailable("down")] * 9)]).run_once()
    assert queue.readers() == {"relay/a": head, "relay/b": 0}
    queue.prune_events(before=head + 1)
    assert queue.events(0, 1)[0].sequence_number == 1
    again = Plain("a")
    work(queue, 1)
    Relay(queue, again).run_once()
    assert [event.sequence_number for event in again.events] == [head + 1, head + 2, head + 3]


def test_a_failed_delivery_is_repeated_and_nothing_is_left_out(queue: LeaseQueue) -> None:
    head = work(queue, 30)
    sink = Plain(errors=[SinkUnavailable("down"), RuntimeError("bug"), TimeoutError()])
    with Relay(queue, sink, rules=Rules(batch_size=7, backoff=QUICK), interval=0.01) as relay:
        assert relay.wait_until(head, 20)
    assert sink.events == list(each_event(queue))


def test_a_sink_that_is_down_or_slow_delays_nobody(queue: LeaseQueue) -> None:
    release = threading.Event()

    class Stuck(Plain):
        def deliver(self, batch: Batch) -> None:
            release.wait(30)
            super().deliver(batch)

    down, stuck, fine = Plain("down", [SinkUnavailable("down")] * 1000), Stuck("stuck"), Plain("fine")
    head = work(queue, 30)
    rules = Rules(batch_size=10, backoff=Backoff(0.001, 0.005))
    with Relay(queue, [down, stuck, fine], rules=rules, interval=0.01) as relay:
        while len(fine.events) < head:
            time.sleep(0.005)
        states = {each.name: each for each in relay.status()}
        assert (states["down"].position, states["down"].state) == (0, "retrying")
        assert states["down"].error == "SinkUnavailable: down"
        down.errors.clear()
        release.set()
        assert relay.wait_until(head, 20)
    assert down.events == stuck.events == fine.events


def test_a_source_that_goes_away_after_a_delivery_does_not_deliver_it_again(queue: LeaseQueue) -> None:
    """How far behind the sink is then cannot be said; that it has the batch can."""
    work(queue, 30)

    class Source:
        namespace, away = queue.namespace, False
        events = staticmethod(queue.events)

        def stats(self) -> object:
            if self.away:
                raise StoreUnavailable("the database is away")
            return queue.stats()

    class Sees(Plain):
        def deliver(self, batch: Batch) -> None:
            super().deliver(batch)
            source.away = True
            relay._pages._head = (0, float("-inf"))  # which is asked for again once in a while

    source, sink = Source(), Sees()
    relay = Relay(source, sink, rules=Rules(batch_size=10, backoff=QUICK), checkpoints=MemoryCheckpoints())
    for _ in range(4):
        relay.run_once()
    assert sink.events == queue.events()


def test_a_second_relay_goes_on_where_the_first_has_brought_the_sink(queue: LeaseQueue, tmp_path: Path) -> None:
    """The queue keeps its log for a sink, not for each of the relays that serve it."""
    plain = Plain()
    rules = Rules(batch_size=10)
    slow, quick = (Relay(queue, [SqlSink(f"sqlite:///{tmp_path}/copy.db"), plain], rules=rules) for _ in range(2))
    head = work(queue, 30)
    slow.run_once(max_batches=1)
    quick.run_once()
    assert queue.prune_events(before=head + 1) == head
    for _ in range(2):
        head = work(queue, 10)
        assert [(each.state, each.position) for each in slow.run_once()] == [("running", head)] * 2
    assert [event.sequence_number for event in read_sql(f"sqlite:///{tmp_path}/copy.db", queue.namespace).read()] == [
        *range(1, head + 1)
    ]


def test_a_checkpoint_that_cannot_be_kept_any_more_is_a_state_and_no_error(queue: LeaseQueue) -> None:
    """As when the queue was made anew between two calls: the place is gone, and so are the events before it."""
    work(queue, 10)

    class Gone(MemoryCheckpoints):
        def advance_reader(self, name: str, to: int) -> None:
            raise InvalidInput("name", "no such reader")

        def register_reader(self, name: str, after: int = 0) -> int:
            if after:
                raise EventsPruned(after, after + 5)
            return super().register_reader(name, after)

    [status] = Relay(queue, Plain(), checkpoints=Gone()).run_once()
    assert status.state == "stopped"
    assert "EventsPruned" in (status.error or "")


def test_a_sink_that_cannot_be_closed_keeps_no_other_open(queue: LeaseQueue) -> None:
    head = work(queue, 5)
    closed: list[str] = []

    class Closed(Plain):
        def close(self) -> None:
            closed.append(self.name)
            if self.name == "first":
                raise TimeoutError("the server does not answer")

    relay = Relay(queue, [Closed("first"), Closed("second")]).start()
    assert relay.wait_until(head, 20)
    assert relay.stop()
    assert closed == ["first", "second"]
    with relay:  # and it can be started again
        pass


def test_sinks_far_apart_do_not_leave_reading_behind(queue: LeaseQueue) -> None:
    """Each needs other pages than the other, so that what was read ahead for one is of no use, and not read either."""
    work(queue, 200)
    asked = threading.Lock()

    class Slow:
        namespace, reads = queue.namespace, 0

        def events(self, after: int, limit: int) -> Sequence[LeaseEvent]:
            with asked:
                self.reads += 1
            time.sleep(0.002)
            return queue.events(after, limit)

    source = Slow()
    pages = Pages(source, 5, 4, 0.25, sealed=True)
    for at in range(0, 200, 5):
        assert pages.after(at, 5)
        assert pages.after(300 + at, 5)
    pages.close()
    assert source.reads <= 2 * 2 * 40  # one that was asked for, and one that was under way


def test_pauses_double_up_to_a_bound_and_differ() -> None:
    backoff = Backoff(1.0, 30.0)
    for failures, whole in ((1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (10_000, 30.0)):
        pauses = {backoff.pause(failures) for _ in range(20)}
        assert all(whole / 2 <= pause <= whole for pause in pauses)
        assert len(pauses) > 1
    assert backoff.pause(1, asked=100.0) == 100.0


def test_a_sink_that_asks_for_time_gets_it(queue: LeaseQueue) -> None:
    work(queue, 1)
    sink = Plain(errors=[SinkUnavailable("later", retry_after=600.0)])
    relay = Relay(queue, sink, rules=Rules(backoff=QUICK))
    relay.run_once()
    relay.run_once()
    assert sink.errors == []
    assert sink.batches == []


# Refusals


def test_a_refused_event_stops_its_sink_after_all_before_it(queue: LeaseQueue) -> None:
    head = work(queue, 20)
    picky, fine = Plain("picky"), Plain("fine")
    picky.refuses = {33}
    relay = Relay(queue, [picky, fine])
    relay.run_once()
    status, other = relay.status()
    assert (status.state, status.position) == ("stopped", 32)
    assert status.error == "RefusedForGood: event 33: not this one"
    assert [event.sequence_number for event in picky.events] == list(range(1, 33))
    assert other.position == head
    assert queue.readers()["relay/picky"] < 33


def test_a_refused_event_can_be_skipped_and_is_recorded(queue: LeaseQueue, tmp_path: Path) -> None:
    head = work(queue, 20)
    sink = Plain()
    sink.refuses = {1, 17, 33, head}
    refused = RefusedEvents(tmp_path / "deep" / "refused.jsonl")
    relay = Relay(queue, sink, rules=Rules(on_refusal="skip"), refused=refused)
    relay.run_once()
    [status] = relay.status()
    assert (status.state, status.position, status.refused) == ("running", head, 4)
    assert {event.sequence_number for event in sink.events} == set(range(1, head + 1)) - sink.refuses
    assert [(each.sink, each.event.sequence_number) for each in refused] == [("plain", n) for n in sorted(sink.refuses)]
    assert next(iter(refused)).reason == "not this one"


def test_skipping_needs_a_place_to_record(queue: LeaseQueue) -> None:
    with pytest.raises(InvalidInput, match="refused"):
        Relay(queue, Plain(), rules=Rules(on_refusal="skip"))


# Where to begin, and what must not be


def test_a_new_sink_begins_where_it_is_told(queue: LeaseQueue) -> None:
    head = work(queue, 200)
    queue.prune_events(before=head - 100)
    oldest = queue.events(after=head - 101, limit=1)[0].sequence_number
    sinks = [Plain("beginning"), Plain("oldest"), Plain("end")]
    rules = {name: Rules(start=name) for name in ("beginning", "oldest", "end")}  # type: ignore[arg-type]
    relay = Relay(queue, sinks, rules=rules)
    relay.run_once()
    stopped, *_ = relay.status()
    assert stopped.state == "stopped"
    assert "EventsPruned" in (stopped.error or "")
    assert sinks[1].events[0].sequence_number <= oldest
    assert sinks[1].events[-1].sequence_number == head
    assert sinks[2].events == []
    work(queue, 1)
    relay.run_once()
    assert [event.sequence_number for event in sinks[2].events] == [head + 1, head + 2, head + 3]


def test_a_copy_begins_where_it_is_told_and_gets_again_what_it_lost(queue: LeaseQueue, tmp_path: Path) -> None:
    head = work(queue, 10)
    for _ in range(2):
        late = Relay(queue, JsonlSink(tmp_path / "late", "late"), rules=Rules(start="end"))
        late.run_once()
        late.stop()
    whole = Relay(queue, JsonlSink(tmp_path / "whole"))
    whole.run_once()
    whole.stop()
    shutil.rmtree(tmp_path / "whole")
    work(queue, 1)
    relay = Relay(
        queue,
        [JsonlSink(tmp_path / "late", "late"), JsonlSink(tmp_path / "whole")],
        rules={"late": Rules(start="end")},
    )
    relay.run_once()
    relay.stop()
    assert list(read_jsonl(tmp_path / "late").read()) == queue.events(head)
    assert list(read_jsonl(tmp_path / "whole").read()) == queue.events()


def test_a_failure_right_after_new_events_is_not_taken_for_another_log(queue: LeaseQueue) -> None:
    class Shaky(MemorySink):
        failing = False

        def deliver(self, batch: Batch) -> None:
            super().deliver(batch)
            if self.failing:
                raise OSError("the answer was lost")

    sink = Shaky()
    relay = Relay(queue, sink, rules=Rules(backoff=Backoff(1e-9, 1e-9)), interval=60)
    work(queue, 10)
    relay.run_once()
    head = work(queue, 10)
    sink.failing = True
    relay.run_once()
    sink.failing = False
    [status] = relay.run_once()
    assert (status.state, status.position, len(sink.kept)) == ("running", head, head)


def test_a_copy_of_another_queue_is_not_added_to(tmp_path: Path) -> None:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/one.db") as one, LeaseQueue.open(f"sqlite:///{tmp_path}/two.db") as two:
        work(one, 50)
        work(two, 3)
        Relay(one, JsonlSink(tmp_path / "copy")).stop()
        relay = Relay(one, JsonlSink(tmp_path / "copy"))
        relay.run_once()
        relay.stop()
        other = Relay(two, JsonlSink(tmp_path / "copy"))
        [status] = other.run_once()
        other.stop()
    assert status.state == "stopped"
    assert "HistoryDiffers" in (status.error or "")


def test_a_dropped_checkpoint_does_not_start_the_sink_over(queue: LeaseQueue) -> None:
    work(queue, 10)
    sink = Plain()
    relay = Relay(queue, sink, rules=Rules(backoff=Backoff(1e-9, 1e-9)))
    relay.run_once()
    queue.drop_reader("relay/plain")
    head = work(queue, 10)
    for _ in range(3):
        relay.run_once()
    assert [event.sequence_number for event in sink.events] == list(range(1, head + 1))
    assert queue.readers() == {"relay/plain": head}


# Batching


def test_a_batch_lingers_until_it_is_full_or_old(queue: LeaseQueue) -> None:
    sink = Plain()
    work(queue, 5)
    relay = Relay(queue, sink, rules=Rules(batch_size=30, linger=3_600), interval=0.001)
    relay.run_once()
    assert sink.batches == []
    work(queue, 5)
    relay.run_once()
    assert [len(batch) for batch in sink.batches] == [30]
    work(queue, 1)
    Relay(queue, sink, rules=Rules(batch_size=30, linger=0.000001), interval=0.001).run_once()
    assert [len(batch) for batch in sink.batches] == [30, 3]


def test_the_log_is_read_once_for_sinks_side_by_side(queue: LeaseQueue) -> None:
    work(queue, 100)
    reads = []

    class Counting:
        namespace = queue.namespace

        def events(self, after: int, limit: int) -> list[LeaseEvent]:
            reads.append(after)
            return queue.events(after, limit)

    sinks = [MemorySink(f"m{number}") for number in range(5)]
    Relay(Counting(), sinks, rules=Rules(batch_size=100), checkpoints=MemoryCheckpoints()).run_once()
    assert all(sink.kept == list(each_event(queue)) for sink in sinks)
    assert reads in ([0, 100, 200, 300], [0, 100, 200, 300, 300])  # the end may be asked for again


# Running


def test_it_follows_a_queue_at_work_and_stops_cleanly(queue: LeaseQueue) -> None:
    sink = Plain()
    relay = Relay(queue, sink, interval=0.01).start()
    with pytest.raises(InvalidInput, match="running"):
        relay.start()
    head = work(queue, 500)
    assert relay.wait_until(head, 30)
    assert relay.stop()
    assert queue.readers() == {"relay/plain": head}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("relay-plain")]
    work(queue, 1)
    relay.run_once()
    assert sink.events == list(each_event(queue))


def test_run_once_is_bounded(queue: LeaseQueue) -> None:
    work(queue, 100)
    sink = Plain()
    [status] = Relay(queue, sink, rules=Rules(batch_size=10)).run_once(max_batches=3)
    assert (status.position, status.behind) == (30, 270)
    assert queue.readers() == {"relay/plain": 30}


def test_a_copy_can_be_relayed_onwards(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 50)
    Relay(queue, JsonlSink(tmp_path / "first")).run_once()
    copy = read_jsonl(tmp_path / "first")
    with pytest.raises(InvalidInput, match="checkpoints"):
        Relay(copy, Plain())
    for _ in range(2):
        sink = Plain()
        Relay(copy, sink, checkpoints=FileCheckpoints(tmp_path / "places.json")).run_once()
    assert sink.events == []
    assert FileCheckpoints(tmp_path / "places.json").readers() == {"relay/plain": 150}


def test_what_is_good_of_a_damaged_copy_is_relayed_and_no_more(queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 20)
    Relay(queue, JsonlSink(tmp_path), rules=Rules(batch_size=7)).run_once()
    [file] = tmp_path.rglob("*.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"sequenceNumber":31,', b'"sequenceNumber":13,'))
    sink = Plain()
    relay = Relay(read_jsonl(tmp_path), sink, checkpoints=MemoryCheckpoints())
    relay.run_once()
    [status] = relay.run_once()  # what comes after a page that is not full is asked for anew
    assert (status.state, status.position) == ("stopped", 28)
    assert sink.events == queue.events(0, 28)


def test_a_source_with_a_hole_is_not_copied(queue: LeaseQueue) -> None:
    work(queue, 5)
    events = queue.events()
    del events[7]

    class Holed:
        def events(self, after: int, limit: int) -> list[LeaseEvent]:
            return [event for event in events if event.sequence_number > after][:limit]

    relay = Relay(Holed(), MemorySink())
    [status] = relay.run_once()
    assert status.state == "stopped"
    assert "missing in the source" in (status.error or "")


def test_a_pruned_source_stops_the_sink_rather_than_leave_a_gap(queue: LeaseQueue) -> None:
    work(queue, 100)
    sink = MemorySink()
    sink.deliver(Batch(queue.events(0, 10)))
    queue.prune_events(before=200)
    with pytest.raises(EventsPruned):
        queue.events(10)
    [status] = Relay(queue, sink).run_once()
    assert status.state == "stopped"
    assert "EventsPruned" in (status.error or "")


@pytest.mark.parametrize(
    ("sinks", "field"),
    [([], "sinks"), ([object()], "sinks"), ([Plain(), Plain()], "sinks"), ([Plain("")], "sinks")],
)
def test_wrong_sinks_are_named(queue: LeaseQueue, sinks: list[Plain], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        Relay(queue, sinks)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (Rules(on_refusal="Skip"), r"^on_refusal: must be one of stop, skip \(got 'Skip' for plain\)"),  # type: ignore[arg-type]
        ({"plain": Rules(start="edn")}, "^start: must be one of beginning, oldest, end .*'edn' for plain"),  # type: ignore[arg-type]
        ({"plain": Rules(), "plane": Rules()}, "^rules: there is no sink 'plane'; there are plain, other"),
    ],
)
def test_wrong_rules_are_named(queue: LeaseQueue, rules: Rules | dict[str, Rules], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Relay(queue, [Plain(), Plain("other")], rules=rules)


def test_the_queue_is_not_touched_while_nothing_happens(queue: LeaseQueue) -> None:
    queue.enqueue(WorkItem("a", "b"))
    reads = []
    original = queue.events

    class Watched:
        namespace = queue.namespace

        def events(self, after: int, limit: int) -> list[LeaseEvent]:
            reads.append(after)
            return original(after, limit)

    sinks = [MemorySink(f"m{number}") for number in range(8)]
    with Relay(Watched(), sinks, interval=0.2, checkpoints=MemoryCheckpoints()) as relay:
        assert relay.wait_until(1, 10)
        before = len(reads)
        started = time.monotonic()
        time.sleep(1.0)
        assert len(reads) - before <= (time.monotonic() - started) / 0.2 + 2  # not eight times as many


@pytest.mark.parametrize("kind", ["jsonl", "objects", "sql", "nats"])
def test_a_queue_made_anew_is_not_appended_to_the_copy_of_the_old_one(
    kind: str, queue: LeaseQueue, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its log is the longer one by now, so that the numbers alone would go on."""
    make: Callable[[], Sink] = {
        "jsonl": lambda: JsonlSink(tmp_path / "copy"),
        "objects": lambda: ObjectStoreSink(f"file://{tmp_path}/copy"),
        "sql": lambda: SqlSink(f"sqlite:///{tmp_path}/copy.db"),
        "nats": lambda: NatsSink(request.getfixturevalue("nats_server").url, stream="ANEW", subject="anew"),
    }[kind]
    work(queue, 50)
    for _ in range(2):  # the same log may go on as often as it likes
        relay = Relay(queue, make(), rules=Rules(linger=0))
        assert relay.run_once()[0].position == 150
        relay.stop()
    with LeaseQueue.open(f"sqlite:///{tmp_path}/anew.db") as anew:
        work(anew, 100)
        relay = Relay(anew, make(), rules=Rules(linger=0))
        [status] = relay.run_once()
        relay.stop()
    assert status.state == "stopped"
    assert "another event 150 than the log" in str(status.error)


def test_a_log_that_was_read_to_its_end_is_left_alone_for_an_interval() -> None:
    with LeaseQueue.open("sqlite://") as queue:
        pages = Pages(queue, size=10, kept=4, quiet=60.0)
        queue.enqueue([WorkItem("file", str(n)) for n in range(13)])
        found = [pages.after(0, 10), pages.after(10, 10)]
        assert [(page.first, page.last) for page in found if page] == [(1, 10), (11, 13)]
        queue.enqueue(WorkItem("file", "later"))
        assert pages.after(13, 10) is None
        pages.wake()
        later = pages.after(13, 10)
        assert later is not None
        assert (later.first, later.last) == (14, 14)
        pages.close()
