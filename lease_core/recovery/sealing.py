"""Who may write: one copy of a namespace at a time.

Every copy has an epoch in its head row, which each transaction reads under the lock and writes on condition that it is
still the same. A primary's is positive. A copy that follows, or one that was superseded, has a negative one: it is
*sealed*, and whatever would write to it raises ``QueueSealed``. One that was superseded names its successor, so that of
two copies that mean to take over, at the same time or after a crash, only one can.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from lease_core.errors import InvalidInput, QueueSealed
from lease_core.replication.errors import HistoryDiffers
from lease_core.store.base import HEAD_COLUMNS, Head, Query, Store, Transaction
from lease_core.unit import SealedUnit

_SET = "UPDATE omnirelay_head SET epoch = ?, successor = ? WHERE ns = ? AND epoch = ? AND coalesce(successor, '') = ?"
_RULES = (
    "UPDATE omnirelay_head SET exclusive = ?, high_mark = ?, low_mark = ?, capacity = ? WHERE ns = ? AND number = 0"
)

_SUCCESSOR = "SELECT successor FROM omnirelay_head WHERE ns = ?"
_OWN = "self:"  # a copy that follows names itself; one that was superseded, the copy that took over


class Rules(NamedTuple):
    """What a namespace lives by; kept with it, but not in its log."""

    exclusive: str | None = None
    high_mark: int | None = None
    low_mark: int | None = None
    capacity: int | None = None


class Sealed(NamedTuple):
    """A namespace that was sealed: the epoch it had, and the last number in its log, for good."""

    epoch: int
    number: int


def find(store: Store, namespace: str) -> Head | None:
    [rows] = store.read(Query(f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE namespace = ?", (namespace,)))
    return Head(*rows[0]) if rows else None


def enter_copy(store: Store, namespace: str, queue_id: str, rules: Rules) -> tuple[Head, str]:
    """The head of a copy at ``store``, made and sealed if there is none, and the name that it would take over under."""
    store.create_namespace(namespace, queue_id)
    head = find(store, namespace)
    assert head is not None
    head = store.run(head.ns, lambda transaction: _seal_new(store, transaction, rules))
    name = _successor(store, head.ns) or ""
    if not name.startswith(_OWN):
        raise InvalidInput(
            "url", f"namespace {namespace!r} there was superseded by another copy and cannot follow; rebuild it"
        )
    return head, name.removeprefix(_OWN)


def _seal_new(store: Store, transaction: Transaction, rules: Rules) -> Head:
    unit = SealedUnit(store, transaction)
    unit.fetch()
    head = unit.head
    if head.epoch < 0:
        return head
    if head.number or head.next_id > 1:
        raise InvalidInput(
            "namespace",
            f"{head.namespace!r} already holds a queue of its own here, with {head.number} events in its log; choose "
            "another database or namespace for the copy",
        )
    name = _OWN + uuid.uuid4().hex
    # two statements on one row: the second must find what the first has left
    transaction.write(_SET, (-1, name, head.ns, head.epoch, ""), 1)
    transaction.write(_RULES, (*rules, head.ns), 1, last=True)
    head.epoch = -1
    return head


def _successor(store: Store, ns: int) -> str | None:
    [[[name]]] = store.read(Query(_SUCCESSOR, (ns,)))
    return None if name is None else str(name)


def follows(store: Store, ns: int) -> bool:
    """Whether this is a copy that follows, rather than a primary or what was one."""
    return (_successor(store, ns) or "").startswith(_OWN)


def check_follows(unit: SealedUnit, ns: int, name: str) -> None:
    """Refuse to bring forward what is no longer the copy ``name``, under the lock: it, or another one, took over.

    Whoever still follows into it would mix what the old primary does with what it does itself.
    """
    [[[present]]] = unit.fetch(Query(_SUCCESSOR, (ns,)))
    if unit.head.epoch >= 0 or present != _OWN + name:
        raise HistoryDiffers(
            f"namespace {unit.head.namespace!r} here no longer follows: it has taken over, or was superseded itself. "
            "Nothing was taken in; begin another copy"
        )


def seal(store: Store, ns: int, successor: str) -> Sealed:
    """Let the namespace take no more writes, in favour of ``successor``. Repeating it for the same one is fine.

    Raises ``QueueSealed`` if it was sealed in favour of another copy.
    """

    def work(transaction: Transaction) -> Sealed:
        unit = SealedUnit(store, transaction)
        unit.fetch()
        [[[present]]] = unit.fetch(Query(_SUCCESSOR, (ns,)))
        head = unit.head
        if head.epoch < 0:
            if present != successor:
                raise QueueSealed(
                    f"namespace {head.namespace!r} was sealed in favour of another copy ({present}); this one must not "
                    "take over. Rebuild it from that copy, or let it follow it"
                )
            return Sealed(-head.epoch, head.number)
        transaction.write(_SET, (-head.epoch, successor, ns, head.epoch, ""), 1)
        transaction.notify()  # whoever waits for work here should hear of it now
        return Sealed(head.epoch, head.number)

    return store.run(ns, work)


def unseal(store: Store, ns: int, name: str, epoch: int) -> None:
    """Make a copy, which knows itself as ``name``, the primary of ``epoch``. Repeating it is fine."""

    def work(transaction: Transaction) -> None:
        unit = SealedUnit(store, transaction)
        unit.fetch()
        if unit.head.epoch == epoch:
            return
        transaction.write(_SET, (epoch, None, ns, unit.head.epoch, _OWN + name), 1)

    store.run(ns, work)
