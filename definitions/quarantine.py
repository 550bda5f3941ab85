"""What was put aside, and why."""

from __future__ import annotations

from collections import Counter

import dagster as dg
import pandas as pd

from lease_core import LeaseQueue
from omnirelay_dagster import LeaseQueueResource

_PAGE = 1_000


@dg.asset(group_name="orders", kinds={"pandas"}, automation_condition=dg.AutomationCondition.eager())
def quarantine(bronze_orders: pd.DataFrame, landing: LeaseQueueResource) -> dg.Output[pd.DataFrame]:
    """All that was put aside, and why: records, and whole files, be they completed or dead letters."""
    found = put_aside(bronze_orders, landing.get_queue())
    return dg.Output(found, metadata={"rows": len(found), **problems(found)})


def put_aside(bronze_orders: pd.DataFrame, landing: LeaseQueue) -> pd.DataFrame:
    """Bad records as they were, with their file, and files that are dead letters."""
    bad = bronze_orders.loc[bronze_orders["problems"].notna(), ["file", "raw", "problems"]]
    dead: list[tuple[str, None, str]] = []
    after = 0
    while letters := landing.dead_letters(after, _PAGE):
        after = letters[-1].sequence_id
        dead += [
            (letter.item.resource_id.rpartition("/")[2], None, (letter.last_error or "").partition("\n")[0])
            for letter in letters
        ]
    return pd.concat([bad, pd.DataFrame(dead, columns=list(bad.columns), dtype=object)], ignore_index=True)


def problems(quarantined: pd.DataFrame) -> dict[str, int]:
    """How often each problem was found; a record may have several."""
    found = Counter(problem for several in quarantined["problems"] for problem in several.split("; "))
    return dict(sorted(found.items()))
