"""The wire form: fixed for ever for what was written, open for what will be."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lease_core import LeaseQueue, WorkItem
from lease_core.model import SCHEMA_VERSION, ErrorRecord, EventType, LeaseEvent, LeaseToken, Value
from lease_core.replication import (
    UnreadableEvent,
    decode_event,
    decode_events,
    encode_event,
    encode_events,
    json_schema,
)
from tests.replication.samples import AT, EVERY_TYPE

GOLDEN = Path(__file__).parent / "golden"


def test_every_version_has_a_golden_file() -> None:
    assert [(GOLDEN / f"v{version}.jsonl").exists() for version in range(1, SCHEMA_VERSION + 1)] == [True]


def test_what_the_first_version_wrote_is_read_as_it_was_meant() -> None:
    assert decode_events((GOLDEN / "v1.jsonl").read_bytes()) == EVERY_TYPE


def test_the_first_version_is_still_written_byte_for_byte() -> None:
    assert encode_events(EVERY_TYPE) == (GOLDEN / "v1.jsonl").read_bytes()


def test_the_golden_file_has_every_type() -> None:
    assert {event.type for event in EVERY_TYPE} == set(EventType)


def test_what_an_older_writer_left_out_is_filled_in() -> None:
    events = decode_events((GOLDEN / "v1-least.jsonl").read_bytes())
    assert [event.type for event in events] == [event.type for event in EVERY_TYPE]
    assert {event.schema_version for event in events} == {1}
    assert events[0] == LeaseEvent("resourcelease", 1, "Enqueued", AT)


def test_what_a_newer_writer_added_is_skipped_and_its_types_are_handed_on() -> None:
    events = decode_events((GOLDEN / "newer.jsonl").read_bytes())
    assert [(event.type, event.schema_version) for event in events] == [
        ("Enqueued", 2),
        ("Paused", 2),
        ("Completed", 1),
        ("Completed", 99),
    ]
    assert events[0].item == WorkItem("file", "a")
    assert events[0].timestamp == AT
    assert events[1].token == LeaseToken(7, 1, "x", 2)
    assert events[3].errors == (ErrorRecord(1, datetime(2026, 11, 16, 8, 30, tzinfo=UTC), "e"),)
    assert decode_events(encode_events(events)) == events  # and its version stays what it was


class OldItem(Value, frozen=True):
    """What a reader knew before attributes, bodies and priorities."""

    resource_type: str
    resource_id: str


class OldEvent(Value, frozen=True):
    namespace: str
    sequence_number: int
    type: str
    timestamp: datetime
    item: OldItem | None = None


class NewEvent(LeaseEvent, frozen=True):
    """What a reader may know one day."""

    region: str = "unknown"
    trace: dict[str, str] = {}  # noqa: RUF012 (msgspec copies it)


@pytest.mark.parametrize("name", ["v1.jsonl", "v1-least.jsonl", "newer.jsonl"])
@pytest.mark.parametrize("reader", [OldEvent, LeaseEvent, NewEvent])
def test_one_stream_of_all_versions_is_read_by_readers_of_all_versions(name: str, reader: type[Value]) -> None:
    stream = b"".join((GOLDEN / each).read_bytes() for each in ("newer.jsonl", name, "v1.jsonl"))
    events = msgspec.json.Decoder(reader).decode_lines(stream)
    assert len(events) == stream.count(b"\n")
    assert [event.type for event in events[-12:]] == [event.type for event in EVERY_TYPE]


def test_a_newer_reader_tells_what_it_knows_from_what_it_fills_in() -> None:
    first, second, *_ = msgspec.json.Decoder(NewEvent).decode_lines((GOLDEN / "newer.jsonl").read_bytes())
    assert (first.region, first.trace) == ("eu", {"parent": "00-ab"})
    assert second.region == "unknown"


# The published schema


@pytest.fixture(scope="module")
def check() -> Callable[[Any], None]:
    schema = json.loads(json_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate


@pytest.mark.parametrize("name", ["v1.jsonl", "v1-least.jsonl", "newer.jsonl"])
def test_golden_files_follow_the_published_schema(name: str, check: Callable[[Any], None]) -> None:
    for line in (GOLDEN / name).read_text().splitlines():
        event = json.loads(line)
        check({key: value for key, value in event.items() if value is not None})


def test_the_published_schema_refuses_what_the_reader_refuses(check: Callable[[Any], None]) -> None:
    good = json.loads(encode_event(EVERY_TYPE[1]))
    for broken in ({"sequenceNumber": "1"}, {"token": {"attempt": 1}}, {"pending": 1.5}, {"type": 3}):
        with pytest.raises(jsonschema.ValidationError):
            check(good | broken)
        with pytest.raises(UnreadableEvent):
            decode_event(json.dumps(good | broken))


def test_the_published_schema_has_every_field() -> None:
    schema = json.loads(json_schema())
    for kind, properties in (
        (LeaseEvent, schema["properties"]),
        *((kind, schema["$defs"][kind.__name__]["properties"]) for kind in (WorkItem, LeaseToken, ErrorRecord)),
    ):
        assert {field.encode_name for field in msgspec.structs.fields(kind)} == set(properties)


# Bad input


def test_a_bad_line_is_named() -> None:
    good = encode_event(EVERY_TYPE[0])
    with pytest.raises(UnreadableEvent, match=r"line 2: .*sequenceNumber"):
        decode_events(good + b"\n" + b'{"namespace":"n"}' + b"\n" + good)
    with pytest.raises(UnreadableEvent, match="line 1"):
        decode_events(b"\xff\xfe\n")


def test_a_time_without_a_zone_is_refused_rather_than_guessed() -> None:
    with pytest.raises(UnreadableEvent, match="timestamp"):
        decode_event(b'{"namespace":"n","sequenceNumber":1,"type":"x","timestamp":"2026-11-16T08:30:00"}')


# Any event

texts = st.text(max_size=20)
moments = st.datetimes(datetime(1970, 1, 2), datetime(9000, 1, 1), timezones=st.just(UTC))
numbers = st.integers(0, 2**62)
documents = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
items = st.builds(
    WorkItem,
    texts,
    texts,
    st.none() | texts,
    st.dictionaries(texts, texts, max_size=3),
    st.binary(max_size=40),
    st.none() | texts,
    st.none() | texts,
    st.integers(-100, 100),
    st.none() | moments,
)
events = st.builds(
    LeaseEvent,
    namespace=texts,
    sequence_number=numbers,
    type=st.sampled_from([str(kind) for kind in EventType]) | texts,
    timestamp=moments,
    sequence_id=st.none() | numbers,
    token=st.none() | st.builds(LeaseToken, numbers, numbers, texts, numbers),
    item=st.none() | items,
    error=st.none() | texts,
    peer_id=st.none() | texts,
    principal=st.none() | texts,
    result=documents,
    pending=numbers,
    active=numbers,
    expires_at=st.none() | moments,
    requeued=st.none() | st.booleans(),
    attempt=st.none() | numbers,
    errors=st.lists(st.builds(ErrorRecord, numbers, moments, texts, st.none() | texts), max_size=2).map(tuple),
    metadata=st.dictionaries(texts, texts, max_size=3),
    schema_version=st.integers(1, 5),
)


@settings(max_examples=40)
@given(st.lists(events, max_size=5))
def test_any_events_come_back_as_they_went(many: list[LeaseEvent]) -> None:
    data = encode_events(many)
    assert data.count(b"\n") == len(many)
    assert decode_events(data) == many
    assert data == b"".join(encode_event(event) + b"\n" for event in many)


@settings(max_examples=40)
@given(events)
def test_any_event_follows_the_rules_of_the_wire(event: LeaseEvent) -> None:
    plain = json.loads(encode_event(event))
    assert None not in plain.values()
    assert plain["schemaVersion"] == event.schema_version
    assert datetime.fromisoformat(plain["timestamp"]).utcoffset() == timedelta(0)
    assert "sequence_number" not in plain


@settings(max_examples=40)
@given(events, st.dictionaries(st.text("xyz", min_size=3), documents, max_size=3))
def test_any_event_is_read_with_any_fields_added(event: LeaseEvent, added: dict[str, Any]) -> None:
    plain = json.loads(encode_event(event))
    assert decode_event(json.dumps(added | plain)) == event


def test_a_queue_writes_what_the_schema_says(check: Callable[[Any], None]) -> None:
    with LeaseQueue.open("sqlite://") as queue:
        queue.enqueue([WorkItem("file", "a", body=b"x"), WorkItem("file", "b")], principal="me")
        first, second = queue.lease("w", limit=2)
        queue.complete(first.token, result={"uri": "z"})
        queue.fail(second.token, ValueError("no"), requeue=False)
        written = queue.events()
    for event in written:
        check(json.loads(encode_event(event)))
    assert decode_events(encode_events(written)) == written
