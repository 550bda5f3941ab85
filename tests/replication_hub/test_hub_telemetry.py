"""What OpenTelemetry is told of the hub, read back through its SDK."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from lease_core.replication import HubServer
from tests.replication_hub.batches import batch, publish


def collect(reader: InMemoryMetricReader) -> Counter[tuple[str, str]]:
    """The counters by name and source, of all namespaces together."""
    data = reader.get_metrics_data()
    assert data is not None
    found: Counter[tuple[str, str]] = Counter()
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            source = str((point.attributes or {}).get("omnirelay.source", ""))
            found[metric.name.removeprefix("omnirelay.hub."), source] += getattr(point, "value", 1)
    return found


def test_everything_is_counted_by_source(tmp_path: Path) -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0", meter=meter) as hub:
        address = f"127.0.0.1:{hub.port}"
        publish(address, [batch(1, 10), batch(6, 15), batch(1, 15), batch(20, 30)])
        publish(address, [batch(1, 5, source="b"), batch(4, 5, source="b", salt="x"), batch(6, 5, source="b")])
    found = collect(reader)
    assert found["events_in", "a"] == 15
    assert found["duplicates", "a"] == 5 + 15
    assert found["gaps", "a"] == 1
    assert found["events_in", "b"] == 5
    assert found["refused", "b"] == 2, "one rewrites history, one is not what it says"
    assert ("refused", "a") not in found
    assert found["commit", ""] >= 1
