"""Fixed blocks of the simulator's histories, on every database. Any number of others: ``make sim``."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from lease_core import unit
from tests.simulation import faults
from tests.simulation.__main__ import main
from tests.simulation.driver import FILE, MEMORY, History
from tests.simulation.record import HistoryFailed, Tally

EVERY_CALL = (
    "AdvanceReader",
    "Complete",
    "Drain",
    "Enqueue",
    "EnqueueInMyTransaction",
    "Fail",
    "Heartbeat",
    "LeaseSome",
    "Look",
    "PruneEvents",
    "PurgeDead",
    "ReadEvents",
    "RegisterReader",
    "Release",
    "ReleaseOwner",
    "RequeueDead",
    "Restore",
    "Sweep",
)


def run(seeds: range, url: str, exclusive: str | None = None) -> Tally:
    total = Tally()
    for seed in seeds:
        total.add(History(seed, url, exclusive).run())
    return total


def assert_it_was_rough(tally: Tally, *kinds: str, at_least: int = 5) -> None:
    """A simulation that provokes nothing proves nothing."""
    rare = {kind: tally.faults[kind] for kind in kinds if tally.faults[kind] < at_least}
    assert not rare, f"these faults hardly fired: {rare}"
    unheard = {name: tally.operations[name] for name in EVERY_CALL if tally.operations[name] < at_least}
    assert not unheard, f"these calls were hardly made: {unheard}"


@pytest.mark.parametrize("exclusive", ["none", "resource", "partition"])
def test_histories_in_memory(exclusive: str) -> None:
    assert_it_was_rough(run(range(100, 120), MEMORY, exclusive), *faults.EVERYWHERE)


def test_histories_on_a_file() -> None:
    assert_it_was_rough(run(range(200, 216), FILE), *faults.EVERYWHERE, *faults.ON_FILES)


def test_histories_on_postgresql(postgres_url: str) -> None:
    assert_it_was_rough(run(range(300, 316), postgres_url), *faults.EVERYWHERE, *faults.ON_SERVERS)


def test_a_seed_gives_the_same_history_each_time() -> None:
    first, second, other = History(7), History(7), History(8)
    for history in (first, second, other):
        history.run(120)
    assert first.digest.hexdigest() == second.digest.hexdigest() != other.digest.hexdigest()


def skip_every_tenth_number(record: Callable[..., int]) -> Callable[..., int]:
    def skipping(self: unit.Unit, *entry: object) -> int:
        first = record(self, *entry)
        self.head.number += self.head.number % 10 == 0
        return first

    return skipping


def test_a_failure_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    broken = skip_every_tenth_number(unit.Unit.record)
    with mock.patch.object(unit.Unit, "record", broken):
        with pytest.raises(HistoryFailed) as failure:
            History(11, exclusive="resource").run(50)
        told = str(failure.value)
        assert f"seed 11 went wrong at step {failure.value.step}" in told
        assert "make sim ARGS='--seed 11 --steps 50 --exclusive resource'" in told
        assert main(["--seed", "11", "--steps", "50", "--exclusive", "resource"]) == 1
    assert "to see it again" in capsys.readouterr().out
    assert main(["--seed", "11", "--steps", "50", "--exclusive", "resource"]) == 0
