"""Items come in whole, in order, and once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lease_core import LeaseQueue, Receipt
from lease_core.errors import InvalidInput
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import ids, log, names, nothing_changes, one, state, types, work, works


def test_receipts_come_in_order_with_dense_ids(queue: LeaseQueue) -> None:
    assert queue.enqueue(works(3)) == [Receipt(1), Receipt(2), Receipt(3)]
    assert queue.enqueue(works(2)) == [Receipt(4), Receipt(5)]


def test_one_item_is_a_batch_of_one(queue: LeaseQueue) -> None:
    assert queue.enqueue(work()) == [Receipt(1)]


def test_any_iterable_of_items_will_do(queue: LeaseQueue) -> None:
    queue.enqueue(item for item in works(3))
    assert queue.stats().pending == 3


def test_no_items_write_nothing(queue: LeaseQueue) -> None:
    with nothing_changes(queue):
        assert queue.enqueue([]) == []


def test_every_field_of_an_item_arrives_unchanged(queue: LeaseQueue, clock: FakeClock) -> None:
    item = work(
        "s3://raw/a.json",
        partition_key="2025-06-15",
        attributes={"colour": "grün", "empty": "", "quote": "\"'\\"},
        body=b"payload",
        payload_encoding="application/json",
        request_id="r-1",
        priority=-7,
        not_before=clock.now(5),
    )
    queue.enqueue(item)
    clock.advance(5)
    assert one(queue).item == item
    assert log(queue)[0].item == item
    assert queue.inspect(1)[0].item == item


@pytest.mark.parametrize("body", [b"", b"\0", bytes(range(256)), b"x" * 1_048_576], ids=["empty", "nul", "all", "1MiB"])
def test_a_body_of_any_bytes_arrives_unchanged(queue: LeaseQueue, body: bytes) -> None:
    queue.enqueue(work(body=body))
    assert one(queue).item.body == body
    assert log(queue)[0].item == work(body=body)


@pytest.mark.parametrize(
    "name", ["ü", "日本", "🚀", "a b", "'; DROP TABLE x; --", "%s ? :x {y}", "a\u2028b", "a\tb", "x" * 1024]
)
def test_an_id_of_any_text_arrives_unchanged(queue: LeaseQueue, name: str) -> None:
    queue.enqueue(work(name, request_id=name, partition_key=name))
    assert one(queue).item == work(name, request_id=name, partition_key=name)
    assert queue.enqueue(work("other", request_id=name)) == [Receipt(1, duplicate=True)]


def test_ids_that_differ_only_in_case_or_unicode_form_are_different_requests(queue: LeaseQueue) -> None:
    receipts = queue.enqueue([work(request_id=text) for text in ("e\u0301", "é", "É", "É ")])
    assert [receipt.duplicate for receipt in receipts] == [False] * 4


def test_a_batch_may_hold_items_of_every_kind_at_once(queue: LeaseQueue, clock: FakeClock) -> None:
    batch = [
        work("low", priority=-1),
        work("plain"),
        work("late", not_before=clock.now(9)),
        work("high", priority=1, body=b"b"),
        work("plain too", attributes={"k": "v"}),
    ]
    assert [receipt.sequence_id for receipt in queue.enqueue(batch)] == [1, 2, 3, 4, 5]
    assert names(queue.lease("worker", 10)) == ["high", "plain", "plain too", "low"]


def test_one_bad_item_refuses_the_whole_batch(queue: LeaseQueue) -> None:
    with nothing_changes(queue), pytest.raises(InvalidInput, match=r"items\[1\]"):
        queue.enqueue([work("good"), work(" ")])


def test_the_event_says_who_brought_the_item(queue: LeaseQueue) -> None:
    queue.enqueue(work(), peer_id="producer", principal="alice")
    [event] = log(queue)
    assert (event.type, event.peer_id, event.principal, event.sequence_id) == ("Enqueued", "producer", "alice", 1)


def test_a_request_id_is_accepted_once_within_a_batch(queue: LeaseQueue) -> None:
    receipts = queue.enqueue([work("a", request_id="r"), work("b"), work("c", request_id="r")])
    assert receipts == [Receipt(1), Receipt(2), Receipt(1, duplicate=True)]
    assert names(queue.lease("worker", 10)) == ["a", "b"]


def test_a_request_id_is_accepted_once_across_calls(queue: LeaseQueue) -> None:
    queue.enqueue(work("a", request_id="r"))
    assert queue.enqueue([work("b"), work("c", request_id="r")]) == [Receipt(2), Receipt(1, duplicate=True)]


def test_a_batch_of_known_requests_leaves_no_trace(queue: LeaseQueue) -> None:
    queue.enqueue(works(1, request_id="r"))
    with nothing_changes(queue):
        queue.enqueue(works(3, request_id="r"))


def test_ids_stay_dense_around_duplicates(queue: LeaseQueue) -> None:
    queue.enqueue(work(request_id="r"))
    receipts = queue.enqueue([work(request_id="r"), work(), work(request_id="r"), work(request_id="s")])
    assert [(receipt.sequence_id, receipt.duplicate) for receipt in receipts] == [
        (1, True),
        (2, False),
        (1, True),
        (3, False),
    ]


@pytest.mark.parametrize("fate", ["pending", "delayed", "leased", "completed", "failed", "dead", "drained"])
def test_a_request_id_stays_known_whatever_became_of_the_item(queue: LeaseQueue, clock: FakeClock, fate: str) -> None:
    queue.enqueue(work(request_id="r", not_before=clock.now(60) if fate == "delayed" else None))
    match fate:
        case "leased":
            one(queue)
        case "completed":
            queue.complete(one(queue))
        case "failed":
            queue.fail(one(queue), "broken")
        case "dead":
            queue.fail(one(queue), "broken", requeue=False)
        case "drained":
            queue.drain()
    with nothing_changes(queue):
        assert queue.enqueue(work("again", request_id="r")) == [Receipt(1, duplicate=True)]


def test_a_request_id_is_known_until_its_completed_item_is_forgotten(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(retention=100)
    queue.enqueue(work(request_id="r"))
    queue.complete(one(queue))
    clock.advance(100)
    queue.sweep()
    assert queue.enqueue(work(request_id="r")) == [Receipt(1, duplicate=True)]
    clock.advance(0.001)
    assert queue.sweep().forgotten == 1
    assert queue.enqueue(work(request_id="r")) == [Receipt(2)]


def test_a_purged_item_frees_its_request_id(queue: LeaseQueue) -> None:
    queue.enqueue(work(request_id="r"))
    queue.fail(one(queue), "broken", requeue=False)
    queue.purge_dead(1)
    assert queue.enqueue(work(request_id="r")) == [Receipt(2)]


def test_request_ids_belong_to_their_namespace(open_queue: OpenQueue) -> None:
    first, second = open_queue("first"), open_queue("second")
    first.enqueue(work(request_id="r"))
    assert second.enqueue(work(request_id="r")) == [Receipt(1)]


def test_time_of_enqueue_is_the_queues_own(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work())
    enqueued = clock.now()
    clock.advance(7)
    lease = one(queue)
    assert (lease.enqueued_at, lease.granted_at) == (enqueued, enqueued + timedelta(seconds=7))
    assert log(queue)[0].timestamp == enqueued


def test_a_large_batch_is_one_call(queue: LeaseQueue) -> None:
    receipts = queue.enqueue(works(10_000))
    assert [receipt.sequence_id for receipt in receipts] == list(range(1, 10_001))
    leases = queue.lease("worker", 10_000)
    assert ids(leases) == list(range(1, 10_001))
    assert not queue.complete(leases).refused
    assert queue.stats().completed == 10_000
    assert len(log(queue)) == 30_000


def test_only_enqueued_is_logged(queue: LeaseQueue) -> None:
    queue.enqueue(works(2))
    assert types(queue) == ["Enqueued", "Enqueued"]
    assert state(queue, 1) == "pending"
