"""The short way from the log to the wire gives the very bytes of the long way."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lease_core import LeaseQueue, QueueConfig, WorkItem, log, log_lines
from lease_core.log import Entry
from lease_core.model import EventType
from lease_core.replication import encode_event

texts = st.text(max_size=8) | st.sampled_from(
    ["100%", "{}", 'a"b\\', 'a",', '","', "null", "[", "ä€😀", "\x00\x1f\x7f\x80\u2028/"]
)
numbers = st.integers(0, 2**53)
moments = st.none() | st.integers(0, 4_000_000_000_000_000)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    n = draw(st.integers(1, 4))

    def named(values: st.SearchStrategy[object]) -> object:
        return draw(values | st.lists(values, min_size=n, max_size=n))

    entry = Entry(
        draw(st.sampled_from([str(kind) for kind in EventType]) | texts),
        n,
        draw(st.none() | numbers),
        pending=draw(st.integers(0, 5)),
        active=draw(st.integers(0, 5)),
        pending_step=draw(st.integers(-1, 1)),
        active_step=draw(st.integers(-1, 1)),
        peer=draw(st.none() | texts),
        principal=draw(st.none() | texts),
        attempt=draw(st.none() | st.integers(0, 9)),
        used=draw(st.none() | st.integers(0, 9)),
        lease=draw(st.none() | texts),
        fence=draw(st.none() | numbers),
        expires_at=draw(moments),
        available_at=draw(moments),
        enqueued_at=draw(moments),
        requeued=draw(st.none() | st.booleans()),
        error=draw(st.none() | texts),
        metadata=draw(st.dictionaries(texts, texts, max_size=2)),
    )
    if draw(st.booleans()):
        entry.result = msgspec.Raw(msgspec.json.encode(draw(st.none() | texts | st.lists(numbers, max_size=2))))
    match draw(st.integers(0, 2)):
        case 0:
            items = [WorkItem(draw(texts), draw(texts), body=draw(st.binary(max_size=5))) for _ in range(n)]
            entry.items = [log.raw(item) for item in items]
        case 1:
            entry.resource_type = named(texts)  # type: ignore[assignment]
            entry.resource_id = named(texts)  # type: ignore[assignment]
            entry.partition_key = named(st.none() | texts)  # type: ignore[assignment]
    return entry


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 2**53), st.lists(entries(), min_size=1, max_size=3), st.integers(0, 12))
def test_any_document(namespace: str, first: int, made: list[Entry], skipped: int) -> None:
    document = log.encode(1_700_000_000_000_000, made)
    after = first - 1 + skipped
    expected = [encode_event(event).decode() for event in log.expand(namespace, first, document, after)]
    assert log_lines.lines(namespace, first, document, after) == expected


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("start", [1, 990, 1_000, 1_999, 999_990])
def test_numbers_that_get_another_digit(start: int, step: int) -> None:
    n = 2_100
    named = Entry(EventType.COMPLETED, n, start + 5, pending=3_000, pending_step=step, active=n, active_step=-1)
    named.attempt, named.lease, named.fence = 1, "lease", start + 9
    named.resource_type, named.resource_id = "file", [str(each) for each in range(n)]
    document = log.encode(1_700_000_000_000_000, [named])
    for after in (0, start + 7, start + 1_500):
        expected = [encode_event(event).decode() for event in log.expand("n", start, document, after)]
        assert log_lines.lines("n", start, document, after) == expected
        found, count = log_lines.pieces("n", start, document, after, 30)
        assert b"".join(found).decode().split("\n")[:-1] == expected[:30]
        assert count == 30


def test_a_queue_that_did_everything() -> None:
    config = QueueConfig(high_watermark=20, max_attempts=2, retry_delay=0)
    with LeaseQueue.open("sqlite://", "100% ä", config) as queue:
        queue.enqueue([WorkItem("file", f"{n}%", str(n % 3), {"a": "b"}, b"\xff", priority=n % 2) for n in range(20)])
        leases = queue.lease("w", limit=12, principal="p")
        queue.heartbeat(leases)
        queue.complete(leases[:4], result={"uri": "s3://x/%41"})
        queue.fail(leases[4], ValueError("no"))
        queue.fail(leases[5], "never", requeue=False)
        queue.release(leases[6:8])
        queue.requeue_dead(queue.dead_letters())
        queue.restore(queue.drain(3))
        for after in (0, 1, 7, 30):
            for limit in (1, 5, 1_000):
                assert queue.event_lines(after, limit) == [
                    encode_event(each).decode() for each in queue.events(after, limit)
                ]
