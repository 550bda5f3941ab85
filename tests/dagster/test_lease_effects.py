"""Effects in a leased body: recorded by the attempt that fails, answered to the one that follows."""

from __future__ import annotations

from pathlib import Path

import dagster as dg

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.resource import LeaseQueueResource


def test_a_retried_run_does_not_repeat_what_was_recorded(tmp_path: Path) -> None:
    landing = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", retry_delay=0)
    charged: list[str] = []
    trouble = [True, False]

    @leased_asset(queue="landing", batch_size=10)
    def invoices(context: dg.AssetExecutionContext, batch: LeasedBatch) -> list[int]:
        numbers = []
        for lease in batch:
            name = lease.item.resource_id
            numbers.append(lease.effects.run_once("charge", lambda name=name: charged.append(name) or len(charged)))
        if trouble.pop(0):
            raise ConnectionError("the warehouse is down")
        return numbers

    with LeaseQueue.open(landing.url, landing.namespace) as queue:
        queue.enqueue([WorkItem("invoice", name) for name in ("a", "b", "c")])
        for expected in (False, True):
            result = dg.materialize([invoices], resources={"landing": landing}, raise_on_error=False)
            assert result.success is expected
        assert charged == ["a", "b", "c"]
        assert result.output_for_node("invoices") == [1, 2, 3]
        assert (queue.stats().completed, queue.stats().pending) == (3, 0)
