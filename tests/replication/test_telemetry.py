"""What OpenTelemetry is told, read back through its SDK."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from lease_core import LeaseQueue
from lease_core.replication import Backoff, MemorySink, Relay, Rules, with_shard
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
    assert points["events_out", "failing"].value == 100
    assert points["failures", "failing"].value == points["retries", "failing"].value == 2
    assert points["failures", "failing"].attributes["error.type"] == "OSError"
    assert points["lag_events", "fine"].value == 0
    assert points["lag_events", "failing"].value == head - 100
    assert points["checkpoint_age", "fine"].value >= 0
    assert points["events_out", "fine"].attributes["omnirelay.shard"] == "eu-1"
    assert points["events_out", "fine"].attributes["omnirelay.namespace"] == "resourcelease"
    lag, queueing, apply = (points[name, "fine"] for name in ("lag", "queueing", "apply"))
    assert lag.count == queueing.count == apply.count == points["batch_size", "fine"].count == 3
    assert abs(lag.sum - (queueing.sum + apply.sum)) < 1e-6
    assert queueing.sum > 0


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
