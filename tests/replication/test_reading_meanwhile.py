"""Sinks that wait for an answer have the next events read meanwhile."""

from __future__ import annotations

import pytest

from lease_core import LeaseQueue
from lease_core.replication import Backoff, Batch, HttpSink, Relay, Rules
from tests.replication.conftest import work
from tests.servers.http_endpoint import HttpEndpoint

TENS = Rules(batch_size=10, backoff=Backoff(0.001, 0.001))


class Source:
    """A queue's log that tells when it is read, and can be away for a while."""

    def __init__(self, queue: LeaseQueue, story: list[tuple[str, int]]) -> None:
        self._queue, self._story = queue, story
        self.namespace, self.events, self.now, self.stats = queue.namespace, queue.events, queue.now, queue.stats
        self.failures: list[int] = []

    def event_payload(self, after: int, limit: int) -> tuple[bytes, int]:
        self._story.append(("read", after + 1))
        if after in self.failures:
            self.failures.remove(after)
            raise OSError("the log is away")
        return self._queue.event_payload(after, limit)


class Asking:
    def __init__(self, story: list[tuple[str, int]], name: str = "asking") -> None:
        self.name, self._story = name, story
        self.numbers: list[int] = []

    def deliver(self, batch: Batch) -> None:
        self._story.append(("sent", batch.first))
        if batch.meanwhile is not None:
            batch.meanwhile()
        self._story.append(("answered", batch.first))
        self.numbers += batch.numbers


def test_the_next_page_is_read_between_a_question_and_its_answer(queue: LeaseQueue) -> None:
    work(queue, 10)
    story: list[tuple[str, int]] = []
    sink = Asking(story)
    Relay(Source(queue, story), sink, rules=TENS, checkpoints=queue).run_once()
    assert sink.numbers == list(range(1, 31))
    assert story[:7] == [
        ("read", 1),
        ("sent", 1),
        ("read", 11),
        ("answered", 1),
        ("sent", 11),
        ("read", 21),
        ("answered", 11),
    ]


def test_a_log_that_is_away_meanwhile_delivers_nothing_twice(queue: LeaseQueue) -> None:
    work(queue, 10)
    story: list[tuple[str, int]] = []
    source, sink = Source(queue, story), Asking(story)
    source.failures = [10, 10, 20]
    relay = Relay(source, sink, rules=TENS, checkpoints=queue, interval=0.001)
    with relay:
        assert relay.wait_until(30, 30)
    assert sink.numbers == list(range(1, 31))


def test_sinks_side_by_side_read_each_page_once(queue: LeaseQueue) -> None:
    work(queue, 100)
    story: list[tuple[str, int]] = []
    sinks = [Asking(story, "one"), Asking(story, "two")]
    Relay(Source(queue, story), sinks, rules=Rules(batch_size=100), checkpoints=queue).run_once()
    assert all(sink.numbers == list(range(1, 301)) for sink in sinks)
    reads = [number for what, number in story if what == "read"]
    assert sorted(set(reads)) == [1, 101, 201, 301]
    assert len(reads) <= 4 + 2  # the end of the log may be looked for by each


def test_what_was_read_meanwhile_is_not_mistaken_for_all_there_is(queue: LeaseQueue) -> None:
    work(queue, 5)
    story: list[tuple[str, int]] = []

    class Slow(Asking):
        def deliver(self, batch: Batch) -> None:
            super().deliver(batch)
            if batch.first == 1:
                work(queue, 20)  # before the answer comes there is much more

    sink = Slow(story)
    Relay(Source(queue, story), sink, rules=TENS, checkpoints=queue, interval=60).run_once()
    assert sink.numbers == list(range(1, 76))
    assert [number for what, number in story if what == "sent"] == list(range(1, 76, 10))


def test_a_log_that_was_away_only_meanwhile_is_no_failure_of_the_sink(queue: LeaseQueue) -> None:
    work(queue, 10)
    story: list[tuple[str, int]] = []
    source, sink = Source(queue, story), Asking(story)
    source.failures = [10]
    [status] = Relay(source, sink, rules=TENS, checkpoints=queue).run_once()
    assert (status.state, status.failures_in_a_row, status.position) == ("running", 0, 30)


def test_sinks_far_apart_do_not_throw_away_what_the_other_has_read(queue: LeaseQueue) -> None:
    work(queue, 100)
    story: list[tuple[str, int]] = []
    ahead, behind = Asking(story, "ahead"), Asking(story, "behind")
    Relay(Source(queue, story), ahead, rules=TENS, checkpoints=queue).run_once(max_batches=15)
    story.clear()
    relay = Relay(Source(queue, story), [ahead, behind], rules=TENS, checkpoints=queue)
    for _ in range(10):
        relay.run_once(max_batches=1)
    assert (ahead.numbers[-1], behind.numbers[-1]) == (250, 100)
    assert len([number for what, number in story if what == "read"]) <= 10 + 10 + 2


@pytest.mark.parametrize("size", [7, 1_000])
def test_an_endpoint_is_told_the_length_of_what_comes(queue: LeaseQueue, endpoint: HttpEndpoint, size: int) -> None:
    work(queue, 10)
    relay = Relay(queue, HttpSink(endpoint.url), rules=Rules(batch_size=size))
    relay.run_once()
    relay.stop()
    assert [event["sequenceNumber"] for event in endpoint.events] == list(range(1, 31))
    assert all(int(headers["content-length"]) > 0 for headers in endpoint.headers)
    assert not any("transfer-encoding" in headers for headers in endpoint.headers)
