"""What one asset has published becomes work for the next: two sensors that read the log and enqueue.

They go by the log, not by Dagster's events, so that a batch whose run was killed right after publishing is handed over
too. The cursor is the number of the last publication that was. Should a tick die before Dagster has stored it, the next
one enqueues again: a batch is known by its ``request_id``, and a day that is computed once more comes out the same.
"""

from __future__ import annotations

import dagster as dg
import pyarrow as pa

from definitions.gold import day_item
from definitions.silver import batch_item
from omnirelay_dagster import FencedIOManager, LeaseQueueResource

AT_ONCE = 200


@dg.sensor(minimum_interval_seconds=5, default_status=dg.DefaultSensorStatus.RUNNING)
def bronze_batches(
    context: dg.SensorEvaluationContext, bronze_io: FencedIOManager, refine: LeaseQueueResource
) -> dg.SensorResult:
    """Every batch that bronze has published, for silver."""
    new = bronze_io.published("bronze_orders", after=int(context.cursor or 0))[:AT_ONCE]
    if not new:
        return dg.SensorResult(skip_reason="bronze has published nothing new")
    refine.get_queue().enqueue([batch_item(each) for each in new])
    return dg.SensorResult(skip_reason=f"{len(new)} batches for silver", cursor=str(new[-1].sequence_number))


@dg.sensor(minimum_interval_seconds=5, default_status=dg.DefaultSensorStatus.RUNNING)
def touched_days(
    context: dg.SensorEvaluationContext, silver_io: FencedIOManager, days: LeaseQueueResource
) -> dg.SensorResult:
    """Every day of which silver has published something new, for gold; one item a day, however many batches."""
    after = int(context.cursor or 0)
    new = silver_io.published("silver_orders", after=after)[:AT_ONCE]
    if not new or (upto := new[-1].sequence_number) is None:
        return dg.SensorResult(skip_reason="silver has published nothing new")
    rows: pa.Table = silver_io.load("silver_orders", pa.Table, after=after, as_of=upto)
    touched = sorted({day.isoformat() for day in rows["day"].unique().to_pylist()})
    if touched:
        days.get_queue().enqueue([day_item(day, upto) for day in touched])
    return dg.SensorResult(skip_reason=f"{len(touched)} days for gold", cursor=str(upto))
