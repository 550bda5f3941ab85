"""What a queue keeps beside its log and a copy should have, too: how far readers have come, and outcomes of effects."""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa

from lease_core import recording, retention
from lease_core.deterministic import sql_state
from lease_core.errors import EventsPruned
from lease_core.queue import LeaseQueue
from lease_core.store.base import Query, Store
from lease_core.unit import SealedUnit, Unit, run

_AT_ONCE = 1_000
_RECORDED = "SELECT key, value FROM omnirelay_state WHERE key LIKE ? AND key > ? ORDER BY key LIMIT ?"


def carry(source: LeaseQueue, store: Store, ns: int, upto: int, besides: str = "") -> None:
    """Bring what ``source`` has into the copy, which stands at event ``upto``. Repeating it is fine."""
    carry_readers(source, store, ns, upto, besides)
    carry_effects(source, store)


def carry_readers(source: LeaseQueue, store: Store, ns: int, upto: int, besides: str = "") -> None:
    """Give the readers of ``source``, but for the one named ``besides``, the same place here.

    One that is further than the copy gets a place at its end; one that waits for what the copy never had, none: it is
    told so when it comes.
    """
    for name, cursor in source.readers().items():
        if name == besides:
            continue
        place = min(cursor, upto)
        try:
            kept = run(store, ns, partial(_register, name=name, place=place), SealedUnit)
        except EventsPruned:
            continue
        if kept < place:
            run(store, ns, partial(_advance, name=name, place=place), SealedUnit)


def _register(unit: Unit, name: str, place: int) -> int:
    return retention.register_reader(unit, name, place)


def _advance(unit: Unit, name: str, place: int) -> None:
    retention.advance_reader(unit, name, place)


def carry_effects(source: LeaseQueue, store: Store) -> None:
    """Copy the outcomes that were recorded under leases of ``source`` in its own database."""
    if not recording.has_tables(source._store):
        return
    last = ""
    while rows := source._store.read(Query(_RECORDED, (f"{source.queue_id}/%", last, _AT_ONCE)))[0]:
        recording.make_tables(store)
        _add(store, [(str(key), str(value)) for key, value in rows])
        last = str(rows[-1][0])


def recorded_by(queue_id: str) -> sa.Select[tuple[str, str]]:
    """The outcomes of one queue's leases: their ids begin with the queue's."""
    return sa.select(sql_state.values.c.key, sql_state.values.c.value).where(
        sql_state.values.c.key.startswith(f"{queue_id}/", autoescape=True)
    )


def _add(store: Store, rows: list[tuple[str, str]]) -> None:
    with store.guard, store.engine.connect() as connection:
        begin = "BEGIN IMMEDIATE" if connection.dialect.name == "sqlite" else "BEGIN"
        store.patiently(lambda: connection.exec_driver_sql(begin))
        try:
            connection.exec_driver_sql(insert_effects(connection.dialect.name), rows)
            connection.exec_driver_sql("COMMIT")
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise


def insert_effects(dialect: str) -> str:
    marks = "?, ?" if dialect == "sqlite" else "%s, %s"
    return f"INSERT INTO {sql_state.values.name} (key, value) VALUES ({marks}) ON CONFLICT (key) DO NOTHING"
