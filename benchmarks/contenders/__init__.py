"""Everything that is measured, in the order in which it is shown.

A contender whose package is missing is not left out in silence: `missing` gives the reason for the table.
"""

from __future__ import annotations

import importlib

from benchmarks.contenders.contract import Contender, Store

MODULES: dict[str, str] = {
    "omnirelay-sqlite": "ours:OnSqlite",
    "raw-sqlite3": "raw_sqlite:RawSqlite",
    "huey": "huey_sqlite:Huey",
    "persist-queue": "persist_queue:PersistQueue",
    "omnirelay-postgres": "ours:OnPostgres",
    "raw-psycopg": "raw_psycopg:RawPsycopg",
    "procrastinate": "procrastinate_pg:Procrastinate",
    "pgqueuer": "pgqueuer_pg:PgQueuer",
    "pgmq": "pgmq_pg:Pgmq",
}

STORES: dict[str, Store] = {name: "sqlite" if position < 4 else "postgres" for position, name in enumerate(MODULES)}


def module_of(name: str) -> str:
    return f"{__name__}.{MODULES[name].partition(':')[0]}"


def load(name: str) -> type[Contender]:
    """The class of a contender. Raises ImportError when what it needs is not installed."""
    contender: type[Contender] = getattr(importlib.import_module(module_of(name)), MODULES[name].partition(":")[2])
    assert issubclass(contender, Contender)
    assert (contender.name, contender.store) == (name, STORES[name])
    return contender


def missing(name: str) -> str | None:
    """Why a contender cannot run here, or None."""
    try:
        load(name)
    except (ImportError, AttributeError) as error:
        return f"unavailable: {error}"
    return None
