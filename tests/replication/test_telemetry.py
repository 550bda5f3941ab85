"""What OpenTelemetry is told, read back through its SDK."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from lease_core import LeaseQueue, WorkItem
from lease_core.replication import Backoff, Batch, MemoryCheckpoints, MemorySink, Relay, Rules, with_shard
from tests.replication.conftest import work
from tests.replication.test_relay import Plain


def collect(reader: InMemoryMetricReader) -> dict[tuple[str, str], Any]:
    """The points by instrument and sink."""
    found = {}
    data = reader.get_metrics_data()
    assert data is not None
    for resource in data.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    found[metric.name.removeprefix("omnirelay.relay."), str(point.attributes["omnirelay.sink"])] = point
    return found


def test_everything_is_counted_by_sink_and_shard(queue: LeaseQueue) -> None:
    head = work(queue, 40)
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    failing = Plain("failing", [OSError("no")] * 2)
    relay = Relay(
        queue,
        [with_shard(MemorySink("fine"), "eu-1"), failing],
        rules=Rules(batch_size=50, backoff=Backoff(1e-9, 1e-9)),
        meter=meter,
    )
    for _ in range(3):
        relay.run_once(2)
    points = collect(reader)
    assert points["events_in", "fine"].value == points["events_out", "fine"].value == head
    assert points["events_in", "failing"].value == points["events_out", "failing"].value == 100
    assert points["failures", "failing"].value == points["retries", "failing"].value == 2
    assert points["failures", "failing"].attributes["error.type"] == "OSError"
    assert points["lag_events", "fine"].value == 0
    assert points["lag_events", "failing"].value == head - 100
    assert points["events_out", "fine"].attributes["omnirelay.shard"] == "eu-1"
    assert points["events_out", "fine"].attributes["omnirelay.namespace"] == "resourcelease"
    lag, queueing, apply = (points[name, "fine"] for name in ("lag", "queueing", "apply"))
    assert lag.count == queueing.count == apply.count == points["batch_size", "fine"].count == 3


class Clock:
    """A time that passes only when told to. The relay's module ``time`` can be exchanged for it."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return self.passed


class Slow:
    """A sink that takes ``seconds`` for each delivery, by the clock, and fails as often as told afterwards."""

    name = "slow"

    def __init__(self, clock: Clock, seconds: float, failures: int = 0) -> None:
        self.clock, self.seconds, self.failures = clock, seconds, failures

    def deliver(self, batch: Batch) -> None:
        self.clock.passed += self.seconds
        if self.failures:
            self.failures -= 1
            raise OSError("no")


class Aged:
    """A source that is ``age`` seconds past its first event."""

    def __init__(self, queue: LeaseQueue, age: float) -> None:
        self._queue, self._age = queue, age
        self.namespace, self.events = queue.namespace, queue.events

    def now(self) -> datetime:
        return self._queue.events(0, 1)[0].timestamp + timedelta(seconds=self._age)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("lease_core.replication.lane.time", made)
    return made


def test_lag_is_how_old_an_event_is_and_how_long_its_delivery_takes(queue: LeaseQueue, clock: Clock) -> None:
    queue.enqueue([WorkItem("file", str(n)) for n in range(3)])  # of one moment
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    places = MemoryCheckpoints()
    Relay(Aged(queue, 100.0), Slow(clock, 7.0), checkpoints=places, meter=meter).run_once()
    points = collect(reader)
    lag, queueing, apply = (points[name, "slow"] for name in ("lag", "queueing", "apply"))
    assert lag.count == queueing.count == apply.count == 1
    assert 99.9 < queueing.sum < 160.0  # and however long this test took until then
    assert apply.sum == 7.0
    assert lag.sum == pytest.approx(queueing.sum + 7.0)


@pytest.mark.parametrize(("every", "age"), [(10.0, 3.0), (100.0, 15.0)])
def test_a_checkpoint_ages_until_it_is_kept(queue: LeaseQueue, clock: Clock, every: float, age: float) -> None:
    queue.enqueue([WorkItem("file", str(n)) for n in range(5)])
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    rules = Rules(batch_size=1, checkpoint_every=every)
    Relay(queue, Slow(clock, 3.0), rules=rules, meter=meter).run_once()
    assert collect(reader)["checkpoint_age", "slow"].value == age


def test_a_checkpoint_ages_while_its_sink_fails(queue: LeaseQueue, clock: Clock) -> None:
    queue.enqueue(WorkItem("file", "a"))
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    relay = Relay(queue, Slow(clock, 30.0, failures=2), rules=Rules(backoff=Backoff(1.0, 1.0)), meter=meter)
    for _ in range(2):
        relay.run_once()
        clock.passed += 10.0
    assert collect(reader)["checkpoint_age", "slow"].value == 70.0


def test_an_event_is_read_once_however_often_it_is_delivered(queue: LeaseQueue) -> None:
    """Also by a sink that has part of the batch already, and is asked for its place before the rest comes again."""
    head = work(queue, 10)
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")

    class Halfway(MemorySink):
        failures = 3

        def deliver(self, batch: Batch) -> None:
            super().deliver(batch.head(4) if self.failures else batch)
            if self.failures:
                self.failures -= 1
                raise OSError("the rest is lost")

    relay = Relay(queue, Halfway(), rules=Rules(batch_size=8, backoff=Backoff(1e-9, 1e-9)), meter=meter)
    for _ in range(4):
        relay.run_once()
    points = collect(reader)
    assert points["failures", "memory"].value == points["retries", "memory"].value == 3
    assert points["events_in", "memory"].value == head


def test_it_runs_without_opentelemetry() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None; sys.modules['opentelemetry.metrics'] = None\n"
        "from lease_core import LeaseQueue, WorkItem\n"
        "from lease_core.replication import MemorySink, Relay\n"
        "queue = LeaseQueue.open('sqlite://'); queue.enqueue(WorkItem('a', 'b')); sink = MemorySink()\n"
        "Relay(queue, sink).run_once(); assert len(sink.kept) == 1\n"
        "assert not {'obstore', 'httpx', 'nats', 'openlineage', 'grpc', 'dagster'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
