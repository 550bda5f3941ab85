"""A code location whose one leased asset works for as long as a file says, so that it can be killed meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import dagster as dg

from omnirelay_dagster.asset_decorator import leased_asset
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.resource import LeaseQueueResource

HOME = Path(os.environ.get("KILLABLE_HOME", "."))


@leased_asset(queue="landing", batch_size=5)
def worked(context: dg.AssetExecutionContext, batch: LeasedBatch) -> list[str]:
    """Says that it began, and waits until it is told to end."""
    (HOME / "began").write_text(str(os.getpid()))
    while (HOME / "wait").exists():
        time.sleep(0.02)
    with (HOME / "done.txt").open("a") as ledger:
        ledger.writelines(f"{lease.token.fence} {lease.item.resource_id}\n" for lease in batch.leases)
    return [item.resource_id for item in batch.items]


work = dg.define_asset_job("work", [worked])
defs = dg.Definitions(
    assets=[worked],
    jobs=[work],
    resources={
        "landing": LeaseQueueResource(
            url=f"sqlite:///{HOME}/fabric.db", namespace="landing", lease_duration=2.0, retry_delay=0
        )
    },
)
