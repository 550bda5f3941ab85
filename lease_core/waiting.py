"""Waiting for work and for room: look, and if there is none sleep until something changed or is due, or time is up.

Sleepers listen before they look, so that no change slips in between, and look again however they were woken.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from lease_core import entering
from lease_core.granting import Due
from lease_core.model import Receipt
from lease_core.store.base import Store
from lease_core.unit import Unit, run

T = TypeVar("T")


def for_work(store: Store, ns: int, seconds: float, grant: Callable[[Unit, int], Due]) -> tuple[Due, float]:
    """What ``grant`` finds as soon as it grants something, or in the end, and when it was asked by the monotonic clock.

    ``grant`` is told for how many microseconds this means to wait on.
    """
    deadline = time.monotonic() + seconds
    bell = store.bell(ns) if seconds else None
    while True:
        mark = bell.listen() if bell else None
        asked_at = time.monotonic()
        left = max(0.0, deadline - asked_at)
        due = _look(store, ns, left, grant)
        if due.look_again:
            continue
        if due.granted or bell is None or left <= 0:
            return due, asked_at
        pause = left if due.next_at is None else min(left, max(0.0, (due.next_at - due.now) / 1_000_000))
        bell.wait(mark, pause)


def for_room(store: Store, ns: int, seconds: float, enqueue: Callable[[Unit], list[Receipt]]) -> list[Receipt]:
    """What ``enqueue`` gives as soon as there is room; ``BackpressureActive`` if there is none in the end."""
    deadline = time.monotonic() + seconds
    bell = store.bell(ns) if seconds else None
    while True:
        mark = bell.listen() if bell else None
        left = max(0.0, deadline - time.monotonic())
        found = _look(store, ns, left, lambda unit, wait: _enqueue_or_sign_up(unit, enqueue, wait))
        if isinstance(found, list):
            return found
        if bell is None or time.monotonic() >= deadline:
            raise found.told()
        bell.wait(mark, deadline - time.monotonic())


def _look(store: Store, ns: int, left: float, act: Callable[[Unit, int], T]) -> T:
    wait = round(left * 1_000_000)
    return run(store, ns, lambda unit: act(unit, wait))


def _enqueue_or_sign_up(
    unit: Unit, enqueue: Callable[[Unit], list[Receipt]], wait: int
) -> list[Receipt] | entering.NoRoom:
    """Enqueue or, where sleepers are woken only if they asked for it, leave a note in the same transaction."""
    try:
        return enqueue(unit)
    except entering.NoRoom as refused:
        until = unit.now + wait
        if wait and unit.store.registers_waiters and unit.head.enqueue_wait_until < until:
            unit.head.enqueue_wait_until = until
            unit.touch_head()
        return refused
