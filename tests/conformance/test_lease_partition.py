"""Leasing the items of one partition, and seeing which partitions wait."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lease_core import LeaseQueue
from lease_core.errors import InvalidInput
from lease_core.replay import replay
from tests.conformance.clock import FakeClock
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import names, nothing_changes, work


def some(queue: LeaseQueue, *keyed: str) -> None:
    """Enqueue together items named like ``eu1``: the letters are the partition, and ``-`` is none."""
    queue.enqueue([work(name, partition_key=None if name[0] == "-" else name.rstrip("0123456789")) for name in keyed])


def test_only_items_of_the_partition_are_leased_in_their_order(queue: LeaseQueue) -> None:
    some(queue, "eu1", "us1", "eu2", "-1", "eu3", "eu4", "us2")
    assert names(queue.lease("w", 3, partition_key="eu")) == ["eu1", "eu2", "eu3"]
    assert names(queue.lease("w", 10, partition_key="eu")) == ["eu4"]
    assert queue.lease("w", 10, partition_key="eu") == []
    assert names(queue.lease("w", 10)) == ["us1", "-1", "us2"]


def test_what_was_cut_out_of_a_batch_can_be_completed_failed_and_replayed(queue: LeaseQueue) -> None:
    some(queue, "eu1", "us1", "eu2", "us2", "eu3")
    eu = queue.lease("w", 10, partition_key="eu")
    us = queue.lease("w", 10, partition_key="us")
    assert queue.complete(eu, atomic=True).refused == ()
    queue.fail(us, "no", delay=0)
    assert names(queue.lease("w", 10, partition_key="us")) == ["us1", "us2"]
    stats = queue.stats()
    replica = replay(queue.events(limit=1_000))
    assert (replica.pending, replica.active) == (stats.pending, stats.active) == (0, 2)
    assert stats.completed == 3


def test_priority_and_time_decide_within_a_partition(queue: LeaseQueue, clock: FakeClock) -> None:
    queue.enqueue(work("low", partition_key="eu"))
    queue.enqueue(work("later", partition_key="eu", not_before=clock.now() + timedelta(seconds=5)))
    queue.enqueue(work("other", partition_key="us", priority=9))
    queue.enqueue(work("high", partition_key="eu", priority=3))
    assert names(queue.lease("w", 10, partition_key="eu")) == ["high", "low"]
    clock.advance(5)
    assert names(queue.lease("w", 10, partition_key="eu")) == ["later"]


def test_an_expired_lease_of_the_partition_is_taken_over_and_no_other(open_queue: OpenQueue, clock: FakeClock) -> None:
    queue = open_queue(lease_duration=10, retry_delay=0)
    some(queue, "eu1", "us1", "eu2")
    queue.lease("gone", 10)
    clock.advance(11)
    again = queue.lease("w", 10, partition_key="eu")
    assert [(lease.item.resource_id, lease.token.attempt) for lease in again] == [("eu1", 2), ("eu2", 2)]
    assert names(queue.lease("w", 10)) == ["us1"]


def test_a_key_that_is_taken_is_not_leased_twice(open_queue: OpenQueue) -> None:
    queue = open_queue(exclusive="partition")
    some(queue, "eu1", "eu2", "us1")
    [first] = queue.lease("w", 10, partition_key="eu")
    assert queue.lease("w", 10, partition_key="eu") == []
    queue.complete(first)
    assert names(queue.lease("w", 10, partition_key="eu")) == ["eu2"]


def test_a_partition_without_work_leaves_no_trace(queue: LeaseQueue) -> None:
    some(queue, "us1")
    with nothing_changes(queue):
        assert queue.lease("w", 10, partition_key="eu") == []
    assert queue.lease("w", 10, partition_key="eu", wait=0.05) == []


@pytest.mark.parametrize("key", ["", " ", 3])
def test_a_partition_key_that_is_none_is_refused(queue: LeaseQueue, key: object) -> None:
    with pytest.raises(InvalidInput, match="partition_key"):
        queue.lease("w", partition_key=key)  # type: ignore[arg-type]


def test_waiting_counts_what_could_be_leased_first_in_line_first(queue: LeaseQueue, clock: FakeClock) -> None:
    assert queue.waiting() == {}
    some(queue, "eu1", "us1", "eu2", "-1")
    queue.enqueue(work("later", partition_key="ap", not_before=clock.now() + timedelta(seconds=5)))
    queue.enqueue(work("first", partition_key="me", priority=1))
    assert list(queue.waiting().items()) == [("me", 1), ("eu", 2), ("us", 1), (None, 1)]
    clock.advance(5)
    assert queue.waiting()["ap"] == 1, "due, though nobody has leased since"
    queue.lease("w", 10, partition_key="eu")
    assert "eu" not in queue.waiting()


def test_waiting_looks_no_further_than_it_is_told(queue: LeaseQueue) -> None:
    some(queue, *(f"eu{n}" for n in range(6)), "us1")
    assert queue.waiting(4) == {"eu": 4}
    assert queue.waiting(7) == {"eu": 6, "us": 1}
    with pytest.raises(InvalidInput, match="limit"):
        queue.waiting(0)
