"""A namespace's row: finding it, making it, and giving it the rules that it lives by."""

from __future__ import annotations

import uuid
from typing import Any

from lease_core.config import QueueConfig
from lease_core.errors import ConfigConflict, SchemaMissing
from lease_core.store.base import HEAD_COLUMNS, Head, Query, Store, Transaction
from lease_core.unit import Unit

_MOST_TOLD = 10


def enter(store: Store, namespace: str, config: QueueConfig) -> Head:
    """Find the namespace's row, or make it, and give it the rules that were asked for."""
    head = _find(store, namespace)
    if head is None:
        store.create_namespace(namespace, uuid.uuid4().hex)
        head = _find(store, namespace)
    if head is None:
        raise SchemaMissing(f"the namespace {namespace!r} could not be made")
    asked = config.model_fields_set
    wanted: dict[str, Any] = {}
    if "high_watermark" in asked:
        wanted |= {"high_mark": config.high_watermark, "low_mark": config.low_mark}
    if "capacity" in asked:
        wanted["capacity"] = config.capacity
    if "exclusive" in asked:
        wanted["exclusive"] = config.exclusive
    if any(getattr(head, field) != value for field, value in wanted.items()):
        store.run(head.ns, lambda transaction: _set_rules(store, transaction, wanted))
    return head


def existing(store: Store, namespace: str) -> Head:
    """Find the namespace's row, and make none: a name that was mistyped is told with those that there are."""
    head = _find(store, namespace)
    if head is None:
        [rows] = store.read(
            Query("SELECT namespace FROM omnirelay_head ORDER BY namespace LIMIT ?", (_MOST_TOLD,)),
        )
        there = ", ".join(str(name) for [name] in rows) or "nothing yet"
        raise SchemaMissing(f"namespace: the database has no {namespace!r}, but {there}; check the name")
    return head


def _find(store: Store, namespace: str) -> Head | None:
    [rows] = store.read(Query(f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE namespace = ?", (namespace,)))
    return Head(*rows[0]) if rows else None


def _set_rules(store: Store, transaction: Transaction, wanted: dict[str, Any]) -> None:
    unit = Unit(store, transaction)
    unit.fetch()
    head = unit.head
    if wanted.get("exclusive", head.exclusive) != head.exclusive and (head.pending or head.active):
        raise ConfigConflict(
            f"exclusive: the queue is {head.exclusive or 'not exclusive'} and holds "
            f"{head.pending + head.active} items; drain it before changing that"
        )
    for field, value in wanted.items():
        setattr(head, field, value)
    unit.touch_head()
    unit.flush()
