"""Versions: pinned once, the same for everybody, and refused where they cannot be run."""

from __future__ import annotations

from typing import Any

import pytest

from lease_core.deterministic import RecordConflict, StateStore, VersionGate, VersionOutsideWindow
from lease_core.errors import InvalidInput
from tests.deterministic import workers


@pytest.fixture
def gate(store: StateStore) -> VersionGate:
    return VersionGate(store)


def never() -> Any:
    raise AssertionError("this branch is not the pinned one")


def test_the_newest_is_pinned_and_stays(gate: VersionGate, name: str) -> None:
    assert gate.pinned(name) is None
    assert gate.version(name, 1, 2) == 2
    assert gate.version(name, 1, 5) == 2
    assert VersionGate(gate.store).version(name, 2, 2, initial=2) == 2
    assert gate.pinned(name) == 2


def test_an_older_one_can_be_pinned_first(gate: VersionGate, name: str) -> None:
    assert gate.version(name, 1, 3, initial=1) == 1
    assert gate.version(name, 1, 3) == 1


def test_changes_are_apart(gate: VersionGate, name: str) -> None:
    assert [gate.version(f"{name}/{n}", 1, n) for n in (1, 2, 3)] == [1, 2, 3]


@pytest.mark.parametrize(("window", "supported"), [((1, 2), "1 to 2"), ((4, 9), "4 to 9"), ((4, 4), "only 4")])
def test_a_version_outside_of_the_window_is_refused(
    gate: VersionGate, name: str, window: tuple[int, int], supported: str
) -> None:
    gate.version(name, 1, 3)
    with pytest.raises(
        VersionOutsideWindow, match=f"pinned to version 3, and this code supports {supported}"
    ) as caught:
        gate.version(name, *window)
    assert (caught.value.change_id, caught.value.version) == (name, 3)
    assert gate.pinned(name) == 3


def test_the_branch_of_the_pinned_version_runs(gate: VersionGate, name: str) -> None:
    assert gate.run(name, {1: lambda: "old", 2: lambda: "new"}) == "new"
    assert gate.run(name, {1: never, 2: lambda: "still two", 3: never}) == "still two"
    for branches in ({1: never}, {1: never, 3: never}):
        with pytest.raises(VersionOutsideWindow, match="pinned to version 2"):
            gate.run(name, branches)


def test_a_branch_can_be_held_back(gate: VersionGate, name: str) -> None:
    assert gate.run(name, {1: lambda: "old", 2: never}, initial=1) == "old"
    assert gate.run(name, {1: lambda: "old", 2: never}) == "old"


def test_a_branch_that_fails_leaves_the_version_pinned(gate: VersionGate, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        gate.run(name, {1: never, 2: lambda: 1 / 0})
    assert gate.pinned(name) == 2


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((2, 1), "minimum"),
        ((-1, 1), "minimum"),
        ((1, True), "maximum"),
        ((1, "2"), "maximum"),
        ((1, 2, 3), "initial"),
        ((1, 2, 0), "initial"),
    ],
)
def test_windows_that_make_no_sense_are_refused(arguments: tuple[Any, ...], field: str) -> None:
    minimum, maximum, initial = (*arguments, None)[:3]
    with StateStore.open("sqlite://") as store:
        gate = VersionGate(store)
        with pytest.raises(InvalidInput, match=field):
            gate.version("change", minimum, maximum, initial=initial)
        assert gate.pinned("change") is None


def test_branches_that_make_no_sense_are_refused() -> None:
    with StateStore.open("sqlite://") as store:
        gate = VersionGate(store)
        for branches, initial, field in (
            ({}, None, "branches"),
            ({"1": never}, None, "branches"),
            ({1: never}, 2, "init"),
        ):
            with pytest.raises(InvalidInput, match=field):
                gate.run("change", branches, initial=initial)  # type: ignore[arg-type]
        assert gate.pinned("change") is None


def test_a_change_is_renamed_with_its_version(gate: VersionGate, name: str) -> None:
    old, new = f"{name}/old", f"{name}/new"
    assert gate.version(old, 1, 1) == 1
    assert gate.version(new, 1, 2, formerly=old) == 1
    assert gate.version(new, 1, 2) == 1
    assert gate.run(f"{name}/b", {2: lambda: "b"}, formerly=f"{name}/a") == "b"
    assert (gate.pinned(f"{name}/a"), gate.pinned(f"{name}/b")) == (2, 2)


def test_versions_that_disagree_are_reported(gate: VersionGate, name: str) -> None:
    gate.version(f"{name}/old", 1, 1)
    gate.version(f"{name}/new", 1, 2)
    with pytest.raises(RecordConflict):
        gate.version(f"{name}/new", 1, 2, formerly=f"{name}/old")


def test_processes_that_race_get_one_version(url: str, name: str) -> None:
    answers = workers.race(workers.pin_each, url, name, 10)
    assert all(len(set(of_one_change)) == 1 for of_one_change in zip(*answers, strict=True))
