"""What cannot be accepted is refused by the name of its field, and nothing is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import reduce
from typing import Any

import pytest

from lease_core import LeaseError, LeaseQueue, LeaseToken, PendingItem, QueueConfig, WorkItem
from lease_core.errors import InvalidConfig, InvalidInput
from tests.conformance.backends import Backend
from tests.conformance.conftest import OpenQueue
from tests.conformance.vocabulary import nothing_changes, one, work, works

Call = Callable[[LeaseQueue], object]

NAN, INF = math.nan, math.inf
HALF = "\ud800"
TOKEN = LeaseToken(1, 1, "x", 1)
WHEN = datetime(2025, 1, 1, tzinfo=UTC)

BAD_NAMES = {
    "empty": "",
    "blank": " \t\n",
    "wide blank": "\u2003\u3000",
    "too long": "x" * 1_025,
    "too long in bytes": "ü" * 513,
    "null byte": "a\0b",
    "half a surrogate pair": f"a{HALF}",
    "bytes": b"a",
    "number": 7,
    "list": ["a"],
}

BAD_SECONDS = {
    "negative": -1,
    "barely negative": -0.000_001,
    "nan": NAN,
    "infinite": INF,
    "minus infinite": -INF,
    "a century": 100 * 366 * 86_400,
    "enormous": 10**400,
    "text": "5",
    "bool": True,
    "decimal": Decimal(1),
    "timedelta": timedelta(seconds=1),
}

BAD_COUNTS = {"zero": 0, "negative": -1, "float": 1.0, "nan": NAN, "bool": True, "text": "1", "huge": 2**70}

ITEM_FIELDS: dict[str, dict[str, Any]] = {
    "resource_type": BAD_NAMES | {"none": None},
    "resource_id": BAD_NAMES | {"none": None},
    "partition_key": BAD_NAMES,
    "request_id": BAD_NAMES,
    "payload_encoding": BAD_NAMES,
    "body": {"text": "x", "none": None, "bytearray": bytearray(b"x"), "too large": b"x" * 1_048_577},
    "priority": {"float": 1.0, "bool": True, "text": "1", "none": None, "low": -(2**31) - 1, "high": 2**31, "nan": NAN},
    "not_before": {
        "no time zone": datetime(2025, 1, 1),
        "text": "2025-01-01T00:00:00Z",
        "number": 1_750_000_000,
        "beyond the calendar": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
    },
    "attributes": {
        "none": None,
        "empty tuple": (),
        "list": ["a"],
        "text": "a",
        "value not text": {"a": 1},
        "value none": {"a": None},
        "key not text": {1: "a"},
        "key blank": {" ": "a"},
        "key too long": {"x" * 1_025: "a"},
        "null byte in value": {"a": "\0"},
        "null byte in key": {"a\0": "a"},
        "half a pair in value": {"a": HALF},
        "too many": {str(n): "a" for n in range(65)},
        "too large": {"a": "x" * 65_537},
    },
}


def make_item(field: str, value: Any) -> WorkItem:
    return WorkItem(**{"resource_type": "file", "resource_id": "a"} | {field: value})


@pytest.mark.parametrize("field", ITEM_FIELDS)
def test_a_bad_item_is_refused_by_the_name_of_its_field(queue: LeaseQueue, field: str) -> None:
    with nothing_changes(queue):
        for kind, value in ITEM_FIELDS[field].items():
            with pytest.raises(InvalidInput, match=field) as raised:
                queue.enqueue([work("good"), make_item(field, value)])
            assert raised.value.field.startswith("items[1]"), kind
            assert raised.value.code == "resourcelease.invalid_input"


CALLS: dict[str, dict[str, Call]] = {
    "items": {
        "enqueue none": lambda q: q.enqueue(None),  # type: ignore[arg-type]
        "enqueue a number": lambda q: q.enqueue(5),  # type: ignore[arg-type]
        "enqueue text": lambda q: q.enqueue("abc"),  # type: ignore[arg-type]
        "enqueue a dict": lambda q: q.enqueue({"resource_type": "a"}),  # type: ignore[arg-type]
        "enqueue a class": lambda q: q.enqueue([WorkItem]),  # type: ignore[list-item]
        "enqueue too many": lambda q: q.enqueue([work()] * 10_001),
        "restore none": lambda q: q.restore(None),  # type: ignore[arg-type]
        "restore a work item": lambda q: q.restore([work()]),  # type: ignore[list-item]
    },
    "tokens": {
        "complete a number": lambda q: q.complete(5),  # type: ignore[arg-type]
        "complete none": lambda q: q.complete(None),  # type: ignore[arg-type]
        "complete text": lambda q: q.complete("token"),  # type: ignore[arg-type]
        "heartbeat a tuple of numbers": lambda q: q.heartbeat((1, 1, "x", 1)),  # type: ignore[arg-type]
        "release a dict": lambda q: q.release([{"sequenceId": 1}]),  # type: ignore[list-item]
        "fail too many": lambda q: q.fail([TOKEN] * 10_001, "broken"),
        "negative id": lambda q: q.complete(LeaseToken(-1, 1, "x", 1)),
        "float id": lambda q: q.complete(LeaseToken(1.0, 1, "x", 1)),  # type: ignore[arg-type]
        "enormous id": lambda q: q.complete(LeaseToken(2**63, 1, "x", 1)),
        "text attempt": lambda q: q.complete(LeaseToken(1, "1", "x", 1)),  # type: ignore[arg-type]
        "no fence": lambda q: q.complete(LeaseToken(1, 1, "x", None)),  # type: ignore[arg-type]
        "no lease id": lambda q: q.complete(LeaseToken(1, 1, None, 1)),  # type: ignore[arg-type]
    },
    "ids": {
        "requeue text": lambda q: q.requeue_dead("1"),  # type: ignore[arg-type]
        "requeue none": lambda q: q.requeue_dead(None),  # type: ignore[arg-type]
        "purge zero": lambda q: q.purge_dead(0),
        "purge true": lambda q: q.purge_dead(True),
        "purge a float": lambda q: q.purge_dead([1.5]),  # type: ignore[list-item]
        "inspect negative": lambda q: q.inspect(-1),
        "inspect enormous": lambda q: q.inspect(2**63),
        "inspect too many": lambda q: q.inspect(range(1, 10_002)),
        "inspect none": lambda q: q.inspect(None),  # type: ignore[arg-type]
    },
    "result": {
        "not json": lambda q: q.complete(TOKEN, result=object()),
        "bytes in a set of sets": lambda q: q.complete(TOKEN, result={"a": {1j}}),
        "half a pair": lambda q: q.complete(TOKEN, result=HALF),
        "no number": lambda q: q.complete(TOKEN, result={"mean": math.nan}),
        "endless": lambda q: q.complete([TOKEN, TOKEN], result=[1, {"most": [math.inf]}]),
        "too deep": lambda q: q.complete(TOKEN, result=reduce(lambda inner, _: {"in": inner}, range(100_000), {})),
        "too large": lambda q: q.complete(TOKEN, result="x" * 1_048_576),
        "one for two": lambda q: q.complete([TOKEN, TOKEN], result=[1]),
    },
    "error": {
        "none": lambda q: q.fail(TOKEN, None),  # type: ignore[arg-type]
        "number": lambda q: q.fail(TOKEN, 5),  # type: ignore[arg-type]
        "bytes": lambda q: q.fail(TOKEN, b"broken"),  # type: ignore[arg-type]
    },
    "limit": {
        "lease too many": lambda q: q.lease("w", 10_001),
        "events too many": lambda q: q.events(limit=100_001),
        "leases too many": lambda q: q.leases(100_001),
    },
    "wait": {
        "with a connection": lambda q: q.enqueue(work(), wait=1, connection=object()),
    },
    "before": {
        "negative": lambda q: q.prune_events(before=-1),
        "float": lambda q: q.prune_events(before=1.0),  # type: ignore[arg-type]
        "enormous": lambda q: q.prune_events(before=2**63),
    },
    "after": {
        "events negative": lambda q: q.events(after=-1),
        "events nan": lambda q: q.events(after=NAN),  # type: ignore[arg-type]
        "events text": lambda q: q.events(after="0"),  # type: ignore[arg-type]
        "events bool": lambda q: q.events(after=True),
        "events enormous": lambda q: q.events(after=2**63),
        "dead letters negative": lambda q: q.dead_letters(after=-1),
        "drained text": lambda q: q.drained(after="1"),  # type: ignore[arg-type]
        "reader negative": lambda q: q.register_reader("r", after=-1),
    },
    "to": {"advance negative": lambda q: q.advance_reader("r", -1)},
    "connection": {
        "no connection at all": lambda q: q.enqueue(work(), connection="sqlite://"),
    },
}


@pytest.mark.parametrize("field", CALLS)
def test_a_bad_argument_is_refused_by_its_name(queue: LeaseQueue, field: str) -> None:
    queue.enqueue(works(2))
    with nothing_changes(queue):
        for kind, call in CALLS[field].items():
            with pytest.raises(InvalidInput) as raised:
                call(queue)
            assert field in raised.value.field, kind
            assert raised.value.problem


NAMED: dict[str, Callable[[LeaseQueue, Any], object]] = {
    "lease peer_id": lambda q, bad: q.lease(bad),
    "release_owner peer_id": lambda q, bad: q.release_owner(bad),
    "enqueue peer_id": lambda q, bad: q.enqueue(work(), peer_id=bad),
    "enqueue principal": lambda q, bad: q.enqueue(work(), principal=bad),
    "lease principal": lambda q, bad: q.lease("w", principal=bad),
    "heartbeat principal": lambda q, bad: q.heartbeat(q.leases(), principal=bad),
    "complete principal": lambda q, bad: q.complete(q.leases(), principal=bad),
    "fail principal": lambda q, bad: q.fail(q.leases(), "broken", principal=bad),
    "release principal": lambda q, bad: q.release(q.leases(), principal=bad),
    "release_owner principal": lambda q, bad: q.release_owner("worker", principal=bad),
    "drain principal": lambda q, bad: q.drain(principal=bad),
    "restore principal": lambda q, bad: q.restore(PendingItem(work(), 9, 0, WHEN), principal=bad),
    "requeue_dead principal": lambda q, bad: q.requeue_dead([1, 2], principal=bad),
    "purge_dead principal": lambda q, bad: q.purge_dead([1, 2], principal=bad),
    "register_reader name": lambda q, bad: q.register_reader(bad),
    "advance_reader name": lambda q, bad: q.advance_reader(bad, 0),
    "drop_reader name": lambda q, bad: q.drop_reader(bad),
}


@pytest.mark.parametrize("where", NAMED)
def test_a_bad_name_is_refused_wherever_one_is_given(queue: LeaseQueue, where: str) -> None:
    queue.enqueue(works(3))
    queue.fail(one(queue), "broken", requeue=False)
    one(queue)
    with nothing_changes(queue):
        for bad in BAD_NAMES.values():
            with pytest.raises(InvalidInput, match=where.split()[1]):
                NAMED[where](queue, bad)


TIMED: dict[str, Callable[[LeaseQueue, Any], object]] = {
    "lease wait": lambda q, bad: q.lease("w", wait=bad),
    "lease duration": lambda q, bad: q.lease("w", duration=bad),
    "heartbeat duration": lambda q, bad: q.heartbeat(q.leases(), duration=bad),
    "enqueue wait": lambda q, bad: q.enqueue(work(), wait=bad),
    "fail delay": lambda q, bad: q.fail(q.leases(), "broken", delay=bad),
    "prune_events older_than": lambda q, bad: q.prune_events(older_than=bad),
}


@pytest.mark.parametrize("where", TIMED)
def test_a_bad_duration_is_refused_wherever_one_is_given(queue: LeaseQueue, where: str) -> None:
    queue.enqueue(works(2))
    one(queue)
    with nothing_changes(queue):
        for bad in BAD_SECONDS.values():
            with pytest.raises(InvalidInput, match=where.split()[1]):
                TIMED[where](queue, bad)


def test_a_lease_of_no_duration_is_refused(queue: LeaseQueue) -> None:
    queue.enqueue(work())
    for nothing in (0, 0.0, 0.000_000_1):
        with nothing_changes(queue), pytest.raises(InvalidInput, match="duration"):
            queue.lease("worker", duration=nothing)


COUNTED: dict[str, Callable[[LeaseQueue, Any], object]] = {
    "lease": lambda q, bad: q.lease("w", bad),
    "leases": lambda q, bad: q.leases(bad),
    "waiting": lambda q, bad: q.waiting(bad),
    "dead_letters": lambda q, bad: q.dead_letters(limit=bad),
    "drained": lambda q, bad: q.drained(limit=bad),
    "drain": lambda q, bad: q.drain(bad),
    "events": lambda q, bad: q.events(limit=bad),
}


@pytest.mark.parametrize("where", COUNTED)
def test_a_bad_limit_is_refused_wherever_one_is_given(queue: LeaseQueue, where: str) -> None:
    queue.enqueue(works(2))
    with nothing_changes(queue):
        for bad in BAD_COUNTS.values():
            with pytest.raises(InvalidInput, match="limit"):
                COUNTED[where](queue, bad)


PENDING: dict[str, PendingItem] = {
    "attempt": PendingItem(work(), 1, -1, WHEN),
    "sequence_id": PendingItem(work(), True, 0, WHEN),
    "enqueued_at": PendingItem(work(), 1, 0, datetime(2025, 1, 1)),
    "last_error": PendingItem(work(), 1, 0, WHEN, last_error="a\0b"),
    "namespace": PendingItem(work(), 1, 0, WHEN, namespace=HALF),
    "queue_id": PendingItem(work(), 1, 0, WHEN, queue_id="a\0b"),
    "last_token": PendingItem(work(), 1, 0, WHEN, last_token=LeaseToken(1, 1, "a\0b", 1)),
    "resource_id": PendingItem(work("a\0b"), 1, 0, WHEN),
}


@pytest.mark.parametrize("field", PENDING)
def test_a_bad_item_is_not_restored(queue: LeaseQueue, field: str) -> None:
    good = PendingItem(work(), 5, 0, WHEN)
    with nothing_changes(queue), pytest.raises(InvalidInput, match=field) as raised:
        queue.restore([good, PENDING[field]])
    assert raised.value.field.startswith("items[1]")


def test_the_limits_can_be_chosen(open_queue: OpenQueue) -> None:
    queue = open_queue(
        max_body_bytes=3, max_attributes=1, max_attribute_bytes=4, max_id_bytes=20, max_batch=2, max_result_bytes=5
    )
    queue.enqueue([work("x" * 20, body=b"abc", attributes={"k": "abcd"}), work()])
    for field, items in {
        "body": [work(body=b"abcd")],
        "attributes": [work(attributes={"a": "", "b": ""})],
        r"attributes.*4": [work(attributes={"a": "abcde"})],
        r"resource_id.*20": [work("x" * 21)],
        r"items.*2": works(3),
    }.items():
        with pytest.raises(InvalidInput, match=field):
            queue.enqueue(items)
    assert queue.stats().head == 2
    with pytest.raises(InvalidInput, match=r"limit.*2"):
        queue.lease("worker", 3)
    with pytest.raises(InvalidInput, match=r"result.*5"):
        queue.complete(one(queue), result="abcd")


def test_listings_need_no_limit_however_small_a_batch_may_be(open_queue: OpenQueue) -> None:
    queue = open_queue(max_batch=3)
    queue.enqueue(works(3))
    queue.fail(one(queue), "broken", requeue=False)
    one(queue)
    queue.drain()
    assert (len(queue.dead_letters()), len(queue.leases()), len(queue.drained())) == (1, 1, 1)


def test_a_refusal_names_the_limit(queue: LeaseQueue) -> None:
    for items, limit in (
        ([work("x" * 2_000)], "1024"),
        ([work(body=b"x" * 2**21)], "1048576"),
        (works(10_001), "10000"),
    ):
        with pytest.raises(InvalidInput, match=limit):
            queue.enqueue(items)


@pytest.mark.parametrize("namespace", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_bad_namespace_opens_nothing(backend: Backend, namespace: Any) -> None:
    with pytest.raises(InvalidInput, match="namespace"):
        backend.open(namespace, QueueConfig(), None)


BAD_CONFIG: list[tuple[str, dict[str, Any]]] = [
    ("lease_duration", {"lease_duration": 0}),
    ("lease_duration", {"lease_duration": -1}),
    ("lease_duration", {"lease_duration": NAN}),
    ("lease_duration", {"lease_duration": INF}),
    ("lease_duration", {"lease_duration": "long"}),
    ("lease_duration", {"lease_duration": None}),
    ("heartbeat_interval", {"heartbeat_interval": 0}),
    ("heartbeat_interval", {"heartbeat_interval": NAN}),
    ("heartbeat_interval", {"heartbeat_interval": 15.1}),
    ("heartbeat_interval", {"heartbeat_interval": 3, "lease_duration": 5}),
    ("max_attempts", {"max_attempts": 0}),
    ("max_attempts", {"max_attempts": 1.5}),
    ("retry_delay", {"retry_delay": -1}),
    ("retry_delay", {"retry_delay": 10, "retry_delay_cap": 5}),
    ("retry_delay", {"retry_delay": NAN}),
    ("retry_delay_cap", {"retry_delay_cap": INF}),
    ("retry_delay_cap", {"retry_delay_cap": -1}),
    ("high_watermark", {"high_watermark": 0}),
    ("high_watermark", {"high_watermark": -5}),
    ("high_watermark", {"high_watermark": 2**70}),
    ("high_watermark", {"high_watermark": 10, "capacity": 9}),
    ("low_watermark", {"low_watermark": 5}),
    ("low_watermark", {"high_watermark": 5, "low_watermark": 5}),
    ("low_watermark", {"high_watermark": 5, "low_watermark": 6}),
    ("low_watermark", {"high_watermark": 5, "low_watermark": -1}),
    ("capacity", {"capacity": 0}),
    ("capacity", {"capacity": 2**70}),
    ("exclusive", {"exclusive": "owner"}),
    ("exclusive", {"exclusive": True}),
    ("retention", {"retention": -1}),
    ("retention", {"retention": NAN}),
    ("max_body_bytes", {"max_body_bytes": -1}),
    ("max_attributes", {"max_attributes": -1}),
    ("max_id_bytes", {"max_id_bytes": 0}),
    ("max_batch", {"max_batch": 0}),
    ("max_batch", {"max_batch": 10**9}),
    ("durability", {"durability": "none"}),
    ("store_timeout", {"store_timeout": 0}),
    ("store_timeout", {"store_timeout": INF}),
    ("lease_seconds", {"lease_seconds": 30}),
]


@pytest.mark.parametrize(("field", "values"), BAD_CONFIG, ids=[str(values) for _, values in BAD_CONFIG])
def test_a_bad_configuration_is_refused_by_the_name_of_its_field(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as raised:
        QueueConfig(**values)
    assert raised.value.field == field
    assert raised.value.code == "resourcelease.invalid_config"


@pytest.mark.parametrize(
    "values",
    [
        {"heartbeat_interval": 15},
        {"high_watermark": 1, "low_watermark": 0},
        {"high_watermark": 5, "capacity": 5},
        {"retry_delay": 0, "retry_delay_cap": 0},
        {"retention": 0},
        {"max_body_bytes": 0},
    ],
    ids=str,
)
def test_a_configuration_at_its_limits_is_good(values: dict[str, Any]) -> None:
    assert QueueConfig(**values).model_dump(include=set(values)) == values


@pytest.mark.parametrize("url", ["", "nonsense", "mysql://host/db", "file.db", "sqlite+aiosqlite:///x", "http://x"])
def test_a_url_that_names_no_database_we_know_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="url"):
        LeaseQueue.open(url)


def test_every_refusal_is_a_lease_error_and_a_value_error() -> None:
    assert issubclass(InvalidInput, LeaseError)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(InvalidConfig, InvalidInput)
