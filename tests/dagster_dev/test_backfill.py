"""A backfill works off the items of its partitions, each run those of its own."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.dagster_dev import instance_view as view
from tests.dagster_dev.fabric import Fabric
from tests.dagster_dev.staged_work import item

pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow  # Dagster looks for backfills twice a minute; the partitions themselves are in tests/dagster
@pytest.mark.parametrize("fabric", ["sqlite"], indirect=True)
def test_a_backfill_takes_the_items_of_its_partitions(fabric: Fabric) -> None:
    queue = fabric.queue("regions")
    queue.enqueue([replace(item(f"n{n}"), partition_key="north") for n in range(3)])
    queue.enqueue([replace(item(f"s{n}"), partition_key="south") for n in range(2)])
    queue.enqueue(replace(item("w0"), partition_key="west"))

    assert view.backfill(fabric.dev, "regional", "north", "south") == "COMPLETED_SUCCESS"

    outputs = fabric.outputs("regions")
    for partition, names in (("north", ["n0", "n1", "n2"]), ("south", ["s0", "s1"])):
        assert [row["name"] for row in outputs.load("regional", partitions=[partition])] == names
    assert queue.stats().pending == 1  # nobody asked for the west
