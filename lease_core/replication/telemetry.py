"""What the relay tells OpenTelemetry, once a batch. Without ``opentelemetry-api`` installed it tells nobody.

Everything carries ``omnirelay.namespace``, ``omnirelay.sink`` and, where there is one, ``omnirelay.shard``. Lag in
seconds is counted from the moment an event was committed until the sink has taken it, so it is the sum of ``queueing``
(waiting for its turn) and ``apply`` (the delivery itself), for the oldest event of the batch.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAME = "lease_core.replication"


class Telemetry:
    """The instruments of all sinks. ``meter`` is OpenTelemetry's global one unless given."""

    def __init__(self, meter: Any = None) -> None:
        meter = meter or global_meter()
        self._on = meter is not None
        if meter is None:
            return
        self._read = meter.create_counter("omnirelay.relay.events_in", "{event}", "Events read for a sink, each once")
        self._sent = meter.create_counter("omnirelay.relay.events_out", "{event}", "Events that a sink has taken")
        self._failures = meter.create_counter("omnirelay.relay.failures", "{failure}", "Deliveries that failed")
        self._retries = meter.create_counter("omnirelay.relay.retries", "{retry}", "Deliveries that were repeated")
        self._refused = meter.create_counter("omnirelay.relay.refused", "{event}", "Events refused for good")
        self._batch = meter.create_histogram("omnirelay.relay.batch_size", "{event}", "Events in a delivery")
        self._queueing = meter.create_histogram("omnirelay.relay.queueing", "s", "From commit to delivery")
        self._apply = meter.create_histogram("omnirelay.relay.apply", "s", "How long a delivery took")
        self._lag = meter.create_histogram("omnirelay.relay.lag", "s", "From commit until the sink has it")
        self._behind = meter.create_gauge("omnirelay.relay.lag_events", "{event}", "Events a sink has yet to take")
        self._age = meter.create_gauge("omnirelay.relay.checkpoint_age", "s", "Since the checkpoint was last kept")

    def delivered(
        self, labels: dict[str, str], events: int, queueing: float, apply: float, behind: int | None, age: float
    ) -> None:
        if not self._on:
            return
        self._sent.add(events, labels)
        self._batch.record(events, labels)
        self._queueing.record(queueing, labels)
        self._apply.record(apply, labels)
        self._lag.record(queueing + apply, labels)
        self._age.set(age, labels)
        if behind is not None:
            self._behind.set(behind, labels)

    def read(self, labels: dict[str, str], events: int) -> None:
        if self._on:
            self._read.add(events, labels)

    def failed(self, labels: dict[str, str], error: BaseException, behind: int | None, age: float) -> None:
        if not self._on:
            return
        self._failures.add(1, {**labels, "error.type": type(error).__name__})
        self._age.set(age, labels)
        if behind is not None:
            self._behind.set(behind, labels)

    def retried(self, labels: dict[str, str]) -> None:
        if self._on:
            self._retries.add(1, labels)

    def refused(self, labels: dict[str, str]) -> None:
        if self._on:
            self._refused.add(1, labels)


def global_meter() -> Any:
    """OpenTelemetry's meter for this package; none without its API."""
    try:
        metrics = importlib.import_module("opentelemetry.metrics")
    except ImportError:
        return None
    return metrics.get_meter(_NAME)
