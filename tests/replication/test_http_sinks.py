"""Sinks that are addressed by a url: an HTTP endpoint, and OpenLineage's."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from lease_core import LeaseEvent, LeaseQueue
from lease_core.errors import InvalidInput
from lease_core.replication import (
    Backoff,
    Batch,
    HttpSink,
    OpenLineageSink,
    RefusedEvents,
    RefusedForGood,
    Relay,
    Rules,
    Sink,
    SinkUnavailable,
)
from lease_core.replication.sinks.http import retry_after
from tests.replication.conftest import work
from tests.servers.http_endpoint import HttpEndpoint

Made = tuple[Callable[[], Sink], Callable[[], Iterable[LeaseEvent]]]


# HTTP


def test_an_endpoint_gets_idempotency_keys(endpoint: HttpEndpoint, queue: LeaseQueue) -> None:
    work(queue, 10)
    HttpSink(endpoint.url, headers={"Authorization": "Bearer x"}).deliver(Batch(queue.events()))
    [headers] = endpoint.headers
    assert headers["idempotency-key"] == "resourcelease/1-30"
    assert headers["authorization"] == "Bearer x"
    assert headers["content-type"] == "application/x-ndjson"


def test_what_a_batch_says_of_itself_is_not_said_otherwise(endpoint: HttpEndpoint, queue: LeaseQueue) -> None:
    work(queue, 10)
    given = {"content-type": "text/plain", "Omnirelay-First": "7", "User-Agent": "me", "Host": "elsewhere"}
    HttpSink(endpoint.url, headers=given).deliver(Batch(queue.events()))
    [headers] = endpoint.headers
    assert (headers["content-type"], headers["omnirelay-first"]) == ("application/x-ndjson", "1")
    assert (headers["user-agent"], headers["host"]) == ("me", "elsewhere")


def test_a_password_in_an_url_reaches_the_endpoint_and_no_log(
    endpoint: HttpEndpoint, queue: LeaseQueue, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    work(queue, 10)
    HttpSink(endpoint.url.replace("://", "://me:hunter%202@")).deliver(Batch(queue.events()))
    [headers] = endpoint.headers
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"me:hunter 2"
    assert "HTTP Request: POST" in caplog.text
    assert "hunter" not in caplog.text


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, RefusedForGood),
        (422, RefusedForGood),
        (401, SinkUnavailable),
        (429, SinkUnavailable),
        (503, SinkUnavailable),
    ],
)
def test_what_an_answer_means(endpoint: HttpEndpoint, queue: LeaseQueue, status: int, error: type[Exception]) -> None:
    work(queue, 1)
    endpoint.answer = lambda events: status
    with pytest.raises(error, match=str(status)):
        HttpSink(endpoint.url).deliver(Batch(queue.events()))


@pytest.mark.parametrize("status", [301, 302, 307, 308, 404, 405, 410])
def test_an_endpoint_that_is_elsewhere_costs_no_event(
    endpoint: HttpEndpoint, queue: LeaseQueue, tmp_path: Path, status: int
) -> None:
    head = work(queue, 3)
    endpoint.answer = lambda events: status
    refused = RefusedEvents(tmp_path / "refused.jsonl")
    rules = Rules(on_refusal="skip", backoff=Backoff(1e-9, 1e-9))
    relay = Relay(queue, HttpSink(endpoint.url), rules=rules, refused=refused)
    [moved] = relay.run_once()
    assert (moved.state, moved.position, moved.refused) == ("retrying", 0, 0)
    assert f"{status}: as told" in str(moved.error)
    assert "check the sink's url" in str(moved.error)
    endpoint.answer = lambda events: None  # the operator has mended it
    [status_now] = relay.run_once()
    assert (status_now.state, status_now.position, len(endpoint.events)) == ("running", head, head)
    assert list(refused) == []


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        ("Fri, 31 Dec 1999 23:59:59 GMT", 59.0),
        ("Sat, 01 Jan 2000 01:00:00 +0100", 60.0),
        ("Sat, 01 Jan 2000 00:00:00 -0000", 60.0),
        ("Fri, 31 Dec 1999 12:00:00 GMT", 0.0),
        ("Fri, 31 Dec 99999 23:59:59 GMT", None),
        ("Fri, 31 Dec 1999 23:59:59 +99999999999999999999", None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(said: str | None, seconds: float | None) -> None:
    assert retry_after(said, datetime(1999, 12, 31, 23, 59, tzinfo=UTC)) == seconds


def test_an_endpoint_that_names_a_date_is_left_alone_until_then(endpoint: HttpEndpoint, queue: LeaseQueue) -> None:
    work(queue, 1)
    endpoint.answer = lambda events: 503
    endpoint.retry_after = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    with pytest.raises(SinkUnavailable) as later:
        HttpSink(endpoint.url).deliver(Batch(queue.events()))
    assert later.value.retry_after is not None
    assert later.value.retry_after > 80_000


def test_an_endpoint_that_is_away_shows_no_secret(queue: LeaseQueue) -> None:
    work(queue, 1)
    with pytest.raises(SinkUnavailable) as away:
        HttpSink("http://me:hunter2@127.0.0.1:9/x", timeout=2).deliver(Batch(queue.events()))
    assert "hunter2" not in str(away.value)


# OpenLineage


def test_completed_items_become_runs(endpoint: HttpEndpoint, queue: LeaseQueue) -> None:
    work(queue, 5)
    sink = OpenLineageSink(endpoint.root)
    for _ in range(2):
        sink.deliver(Batch(queue.events()))
    sink.close()
    assert len(endpoint.runs) == 5
    run = next(iter(endpoint.runs.values()))
    assert run["eventType"] == "COMPLETE"
    assert run["job"]["namespace"] == "resourcelease"
    assert run["job"]["name"] == "file"
    assert run["job"]["facets"]["ownership"]["owners"][0]["name"] == "worker-1"
    assert (run["inputs"][0]["namespace"], run["inputs"][0]["name"]) == ("s3://raw", "0.json")
    assert (run["outputs"][0]["namespace"], run["outputs"][0]["name"]) == ("s3://out", "0")
    facet = run["run"]["facets"]["omnirelay_lease"]
    assert (facet["owner"], facet["principal"], facet["attempt"]) == ("worker-1", "svc", 1)


@pytest.mark.parametrize("short", [True, False])
def test_a_password_reaches_the_lineage_backend_and_no_log(
    endpoint: HttpEndpoint, queue: LeaseQueue, caplog: pytest.LogCaptureFixture, short: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    work(queue, 1)
    url = endpoint.root.replace("://", "://me:hunter%202@")
    sink = OpenLineageSink(url) if short else OpenLineageSink(transport={"type": "http", "url": url, "timeout": 3})
    sink.deliver(Batch(queue.events()))
    sink.close()
    [headers] = endpoint.headers
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"me:hunter 2"
    assert "openlineage" in caplog.text
    assert "hunter" not in caplog.text
    assert base64.b64encode(b"me:hunter 2").decode() not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hun/ter2@host/",
        "http://me:hunter#2@host/",
        "http://me:hun?ter2@host",
        "http://me:12/hunter2@host",
        "http://me:hun\uff1ater2@host",
        "me:hunter2@host:9",
        "http:/me:hunter2@host/",
    ],
)
@pytest.mark.parametrize("sink", [HttpSink, OpenLineageSink])
def test_a_url_that_cannot_be_taken_apart_is_refused_without_being_shown(sink: Any, url: str) -> None:
    with pytest.raises(InvalidInput, match="write / as %2F") as refusal:
        sink(url)
    assert "hun" not in str(refusal.value)


def test_a_password_leaves_the_clients_own_configuration_as_it_is(
    endpoint: HttpEndpoint, queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TIMEOUT", "99")
    work(queue, 1)
    sink = OpenLineageSink(endpoint.root.replace("://", "://me:hunter2@"))
    sink.deliver(Batch(queue.events()))
    assert sink._client.transport.timeout == 99
    sink.close()


def test_a_lineage_backend_that_refuses_names_the_event(endpoint: HttpEndpoint, queue: LeaseQueue) -> None:
    work(queue, 2)
    endpoint.answer = lambda events: 422
    with pytest.raises(RefusedForGood) as refusal:
        OpenLineageSink(endpoint.root).deliver(Batch(queue.events()))
    assert refusal.value.sequence_number == 5


def test_a_lineage_backend_that_is_elsewhere_refuses_nothing(endpoint: HttpEndpoint, queue: LeaseQueue) -> None:
    work(queue, 2)
    endpoint.answer = lambda events: 404
    with pytest.raises(SinkUnavailable, match=r"404.*check the sink's url"):
        OpenLineageSink(endpoint.root).deliver(Batch(queue.events()))
