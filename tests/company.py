"""Which tests share a process when several processes run the suite, and in which order they begin.

Whoever needs the same costly thing (a Spark session, a running ``dagster dev``) goes to the same process, so that it is
started once. All others stay together by file. What takes longest begins first, so that nobody waits for it at the end.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

COMPANIES = {
    "dagster dev": ("tests/dagster_dev/",),
    "spark in this process": (
        "tests/spark_log/",
        "tests/spark/test_job_group.py",
        "tests/spark/test_parquet_output.py",
        "tests/iceberg/test_spark_folders.py",
        "tests/fabric/",
        "tests/test_docs.py",
    ),
    "spark in processes of its own": ("tests/spark/",),
}
# a third process waits for clocks and kills while two are busy; only then come the many processes of Spark
FIRST = (
    "dagster dev",
    "spark in this process",
    "tests/environment/test_hold.py",
    "tests/test_simulation.py",
    "spark in processes of its own",
    "tests/environment/",
    "tests/test_kills.py",
    "tests/test_planted_bugs.py",
)


def company(nodeid: str) -> str:
    """The name of those that a test shares its process with."""
    file = nodeid.partition("::")[0]
    return next((name for name, places in COMPANIES.items() if file.startswith(places)), file)


def arrange(items: list[pytest.Item]) -> None:
    """Put the tests in the order in which they begin: first what takes long, then the rest as it was found."""

    def rank(item: pytest.Item) -> int:
        name = company(item.nodeid)
        return next((place for place, first in enumerate(FIRST) if name.startswith(first)), len(FIRST))

    items.sort(key=rank)


class CompanyScheduling(LoadScopeScheduling):
    """Gives each process whole companies, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return company(nodeid)
