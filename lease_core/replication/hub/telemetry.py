"""What the hub tells OpenTelemetry, once a commit. Without ``opentelemetry-api`` installed it tells nobody.

Everything but the time of a commit carries ``omnirelay.source`` and ``omnirelay.namespace``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lease_core.replication.hub.admission import Offer, Verdict
from lease_core.replication.telemetry import global_meter


class HubTelemetry:
    """The instruments of all sources. ``meter`` is OpenTelemetry's global one unless given."""

    def __init__(self, meter: Any = None) -> None:
        meter = meter or global_meter()
        self._on = meter is not None
        if meter is None:
            return
        self._counters = {
            "stored": meter.create_counter("omnirelay.hub.events_in", "{event}", "Events that are now kept"),
            "again": meter.create_counter("omnirelay.hub.duplicates", "{event}", "Events that had been kept before"),
            "gap": meter.create_counter("omnirelay.hub.gaps", "{batch}", "Batches before which events were missing"),
            "refused": meter.create_counter("omnirelay.hub.refused", "{batch}", "Batches refused for good"),
            "failed": meter.create_counter("omnirelay.hub.failures", "{batch}", "Batches that could not be stored"),
        }
        self._commit = meter.create_histogram("omnirelay.hub.commit", "s", "How long a commit of many batches took")

    def judged(self, offers: Sequence[Offer], verdicts: Sequence[Verdict], seconds: float) -> None:
        """What became of the batches of one commit."""
        if not self._on:
            return
        counted: Counter[tuple[str, str, str]] = Counter()
        for offer, verdict in zip(offers, verdicts, strict=True):
            for kind, number in _counts(offer, verdict).items():
                counted[kind, offer.source, offer.namespace] += number
        for (kind, source, namespace), number in counted.items():
            if number:
                self._counters[kind].add(number, {"omnirelay.source": source, "omnirelay.namespace": namespace})
        self._commit.record(seconds)

    def invalid(self, source: str) -> None:
        """A batch that is not what it says: its namespace is nothing to go by."""
        if self._on:
            self._counters["refused"].add(1, {"omnirelay.source": source})


def _counts(offer: Offer, verdict: Verdict) -> dict[str, int]:
    match verdict.outcome:
        case "STORED":
            return {"stored": verdict.stored, "again": offer.last - offer.first + 1 - verdict.stored}
        case "MISSING":
            return {"gap": 1}
        case "UNAVAILABLE":
            return {"failed": 1}
        case _:
            return {"refused": 1}
