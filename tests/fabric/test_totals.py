"""From files to gold on Spark: what comes out is what a plain pass over the files comes to."""

from __future__ import annotations

from definitions.findings import revenue_of_versions
from definitions.orders import write_files
from tests.fabric.driving import Driver


def test_the_totals_are_those_of_the_files_also_after_more_of_them(driver: Driver) -> None:
    write_files(driver.landing, 24)
    driver.bronze()
    driver.refine()
    before = driver.silver()

    # 20 files on come orders of the first files that were late, and changes of orders from before
    write_files(driver.landing, 20, first=24)
    driver.bronze()
    driver.cursors["bronze_batches"] = None  # as after a crash: everything is handed over once more
    driver.refine()
    driver.run("show_results")

    expected, silver = driver.by_files(), driver.silver()
    assert driver.left() == {}
    assert driver.by_assets() == expected
    assert driver.by_iceberg() == expected
    assert revenue_of_versions(silver) == expected.total
    assert not silver.duplicated(["order_id", "updated_at"]).any()
    _is_a_hard_case(before, silver, expected)


def _is_a_hard_case(before, silver, expected) -> None:  # type: ignore[no-untyped-def]
    """The files have in them what the comparison is meant to be about."""
    assert {"the file is empty", "not a JSON object", "quantity is below 1"} <= expected.problems.keys()
    assert expected.orders < len(silver)  # orders that changed
    assert set(silver["country"]) == {"DE", "FR", "NL"}
    late = silver[~silver["order_id"].isin(before["order_id"])]
    assert late["day"].min() == before["day"].min()  # a day of gold was computed again
