"""Which version of the code a change runs under: decided once, then the same for every replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from lease_core.deterministic import records
from lease_core.deterministic.errors import VersionOutsideWindow
from lease_core.deterministic.records import VERSION, Record
from lease_core.deterministic.state import StateStore
from lease_core.errors import InvalidInput

T = TypeVar("T")


class VersionGate:
    """Pins a version per change id the first time it is asked for, and answers the same ever after.

    Of any number of processes that ask first, one pins; all get what it pinned.
    """

    def __init__(self, store: StateStore) -> None:
        self.store = store

    def version(
        self, change_id: str, minimum: int, maximum: int, *, initial: int | None = None, formerly: str | None = None
    ) -> int:
        """The pinned version of ``change_id``; if there is none, ``initial`` (by default ``maximum``) is pinned.

        Raises ``VersionOutsideWindow`` if what is pinned is below ``minimum`` or above ``maximum``: the caller cannot
        run it. ``formerly`` is the change id that older workers use for the same change: both then have the same
        version.
        """
        _window(minimum, maximum)
        first = maximum if initial is None else _number("initial", initial)
        if not minimum <= first <= maximum:
            raise InvalidInput("initial", f"must be from {minimum} to {maximum} (got {first})")
        pinned = self._pin(change_id, first, formerly)
        if not minimum <= pinned <= maximum:
            supported = f"{minimum} to {maximum}" if minimum < maximum else f"only {minimum}"
            raise VersionOutsideWindow(change_id, pinned, supported)
        return pinned

    def run(
        self,
        change_id: str,
        branches: Mapping[int, Callable[[], T]],
        *,
        initial: int | None = None,
        formerly: str | None = None,
    ) -> T:
        """Run the branch for the pinned version. The highest (or ``initial``) is pinned if there is none yet.

        Raises ``VersionOutsideWindow`` if there is no branch for what is pinned; nothing is run then.
        """
        if not branches:
            raise InvalidInput("branches", "must hold at least one version")
        for each in branches:
            _number("branches", each)
        first = max(branches) if initial is None else initial
        if first not in branches:
            raise InvalidInput("initial", f"must be one of the branches {sorted(branches)} (got {first!r})")
        pinned = self._pin(change_id, first, formerly)
        if pinned not in branches:
            raise VersionOutsideWindow(change_id, pinned, ", ".join(map(str, sorted(branches))))
        return branches[pinned]()

    def pinned(self, change_id: str) -> int | None:
        """The pinned version, or None: for looking, without pinning."""
        found = records.find(self.store, VERSION, records.check_id("change_id", change_id))
        return None if found is None else _version(found)

    def _pin(self, change_id: str, version: int, formerly: str | None) -> int:
        records.check_id("change_id", change_id)
        records.check_renaming("change_id", change_id, formerly)
        found = records.find(self.store, VERSION, change_id, formerly)
        if found is None:
            first = formerly or change_id
            ours = records.new(VERSION, first, version=version)
            there = records.read(VERSION, first, self.store.add(first, records.document(ours)).value)
            found = there if formerly is None else records.copy(self.store, there, change_id)
        return _version(found)


def _version(record: Record) -> int:
    assert record.version is not None
    return record.version


def _window(minimum: int, maximum: int) -> None:
    _number("minimum", minimum)
    _number("maximum", maximum)
    if minimum > maximum:
        raise InvalidInput("minimum", f"must not be above maximum ({minimum} > {maximum})")


def _number(where: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise InvalidInput(where, f"versions are whole numbers, 0 or more (got {value!r})")
    return value
