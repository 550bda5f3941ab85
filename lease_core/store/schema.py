"""The tables, the same on SQLite and PostgreSQL.

``item`` rows never change: what an item is. ``span`` rows say how items stand: one row for all neighbours in the same
condition, so that leasing or completing a thousand items together writes one row, not a thousand. ``log`` has one row
a transaction. ``head`` has one row a namespace: its counters, the last log number, and the lock that puts writers
in order.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData()

VERSION_TABLE = "omnirelay_version"
REVISION = "0002"


def _partial(name: str, *columns: Any, where: str) -> Index:
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))


head = Table(
    "omnirelay_head",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=True),
    Column("namespace", Text, nullable=False, unique=True),
    Column("queue_id", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, server_default=text("1")),
    Column("next_id", BigInteger, nullable=False, server_default=text("1")),
    Column("number", BigInteger, nullable=False, server_default=text("0")),
    Column("pruned", BigInteger, nullable=False, server_default=text("0")),
    Column("pending", BigInteger, nullable=False, server_default=text("0")),
    Column("active", BigInteger, nullable=False, server_default=text("0")),
    Column("dead", BigInteger, nullable=False, server_default=text("0")),
    Column("completed", BigInteger, nullable=False, server_default=text("0")),
    Column("backpressure", SmallInteger, nullable=False, server_default=text("0")),
    Column("high_mark", BigInteger),
    Column("low_mark", BigInteger),
    Column("capacity", BigInteger),
    Column("exclusive", Text),
    Column("next_due", BigInteger),
    Column("next_expiry", BigInteger),
    Column("lease_wait_until", BigInteger, nullable=False, server_default=text("0")),
    Column("enqueue_wait_until", BigInteger, nullable=False, server_default=text("0")),
    Column("successor", Text),
    postgresql_with={"fillfactor": 10},
)

item = Table(
    "omnirelay_item",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=False),
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("enqueued_at", BigInteger, nullable=False),
    Column("resource_type", Text, nullable=False),
    Column("resource_id", Text, nullable=False),
    Column("partition_key", Text),
    Column("request_id", Text),
    Column("extra", Text),
    Column("body", LargeBinary),
    sqlite_with_rowid=False,
)
_partial("omnirelay_item_request", item.c.ns, item.c.request_id, where="request_id IS NOT NULL").unique = True

span = Table(
    "omnirelay_span",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=False),
    Column("first", BigInteger, primary_key=True, autoincrement=False),
    Column("last", BigInteger, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("ready", SmallInteger, nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("available_at", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("lease_id", Text),
    Column("owner", Text),
    Column("fence", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("ended", SmallInteger),
    Column("key", Text),
    Column("result", LargeBinary),
    Column("has_errors", SmallInteger, nullable=False),
    sqlite_with_rowid=False,
    postgresql_with={
        "fillfactor": 70,
        "autovacuum_vacuum_scale_factor": 0.02,
        "autovacuum_vacuum_threshold": 1000,
    },
)
_partial(
    "omnirelay_span_ready",
    span.c.ns,
    span.c.priority.desc(),
    span.c.available_at,
    span.c.first,
    where="state = 1 AND ready = 1",
)
_partial(
    "omnirelay_span_waiting",
    span.c.ns,
    span.c.ready,
    span.c.available_at,
    span.c.first,
    where="state = 1 AND ready <> 1",
)
_partial("omnirelay_span_expiring", span.c.ns, span.c.expires_at, where="state = 2")
_partial("omnirelay_span_aside", span.c.ns, span.c.state, span.c.first, where="state IN (4, 5)")
_partial("omnirelay_span_finished", span.c.ns, span.c.available_at, where="state IN (3, 5)")
_partial("omnirelay_span_key", span.c.ns, span.c.key, span.c.first, where="key IS NOT NULL")

log = Table(
    "omnirelay_log",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=False),
    Column("last", BigInteger, primary_key=True, autoincrement=False),
    Column("first", BigInteger, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("nonce", BigInteger, nullable=False),
    Column("document", LargeBinary, nullable=False),
)

error = Table(
    "omnirelay_error",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=False),
    Column("last", BigInteger, primary_key=True, autoincrement=False),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("nth", Integer, primary_key=True, autoincrement=False),
    Column("first", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("at", BigInteger, nullable=False),
    Column("peer", Text),
    Column("error", Text, nullable=False),
    sqlite_with_rowid=False,
)

origin = Table(
    "omnirelay_origin",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=False),
    Column("queue_id", Text, primary_key=True),
    Column("origin_id", BigInteger, primary_key=True, autoincrement=False),
    Column("namespace", Text),
    Column("id", BigInteger, nullable=False),
    UniqueConstraint("ns", "id", name="omnirelay_origin_here"),
    sqlite_with_rowid=False,
)

reader = Table(
    "omnirelay_reader",
    metadata,
    Column("ns", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("cursor", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
