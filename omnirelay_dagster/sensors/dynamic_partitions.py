"""Adding to dynamic partitions from a sensor: which keys Dagster takes, and which of them are new."""

from __future__ import annotations

import re
from collections.abc import Iterable

import dagster as dg

NOT_IN_KEYS = re.compile(r"[\x00-\x1f]|\.(?=\.\.)")
"""What Dagster does not take in the key of a partition."""


def new_partitions(
    name: str | None, keys: Iterable[str | None], instance: dg.DagsterInstance
) -> list[dg.AddDynamicPartitionsRequest]:
    """The request that adds those of the keys that the dynamic partitions ``name`` do not have yet."""
    if name is None:
        return []
    new = [key for key in dict.fromkeys(keys) if key is not None and not instance.has_dynamic_partition(name, key)]
    return [dg.AddDynamicPartitionsRequest(name, new)] if new else []
