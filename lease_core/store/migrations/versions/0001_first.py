"""The first schema."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

BIG, INT, SMALL, TEXT, BYTES = sa.BigInteger, sa.Integer, sa.SmallInteger, sa.Text, sa.LargeBinary


def _required(name: str, kind: Any, default: int | None = None) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, server_default=None if default is None else sa.text(str(default)))


def _key(name: str, kind: Any = BIG) -> sa.Column[Any]:
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def _index(name: str, table: str, columns: list[Any], where: str, unique: bool = False) -> None:
    op.create_index(name, table, columns, unique=unique, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def upgrade() -> None:
    op.create_table(
        "omnirelay_head",
        sa.Column("ns", INT, primary_key=True, autoincrement=True),
        sa.Column("namespace", TEXT, nullable=False, unique=True),
        _required("queue_id", TEXT),
        _required("epoch", BIG, 1),
        _required("next_id", BIG, 1),
        *(_required(name, BIG, 0) for name in ("number", "pruned", "pending", "active", "dead", "completed")),
        _required("backpressure", SMALL, 0),
        *(sa.Column(name, BIG) for name in ("high_mark", "low_mark", "capacity")),
        sa.Column("exclusive", TEXT),
        *(sa.Column(name, BIG) for name in ("next_due", "next_expiry")),
        _required("lease_wait_until", BIG, 0),
        _required("enqueue_wait_until", BIG, 0),
        postgresql_with={"fillfactor": 10},
    )
    op.create_table(
        "omnirelay_item",
        _key("ns", INT),
        _key("id"),
        _required("enqueued_at", BIG),
        _required("resource_type", TEXT),
        _required("resource_id", TEXT),
        *(sa.Column(name, TEXT) for name in ("partition_key", "request_id", "extra")),
        sa.Column("body", BYTES),
        sqlite_with_rowid=False,
    )
    _index(
        "omnirelay_item_request",
        "omnirelay_item",
        ["ns", "request_id"],
        "request_id IS NOT NULL",
        unique=True,
    )
    op.create_table(
        "omnirelay_span",
        _key("ns", INT),
        _key("first"),
        _required("last", BIG),
        _required("state", SMALL),
        _required("ready", SMALL),
        _required("priority", BIG),
        _required("available_at", BIG),
        _required("attempt", INT),
        sa.Column("lease_id", TEXT),
        sa.Column("owner", TEXT),
        _required("fence", BIG),
        sa.Column("expires_at", BIG),
        sa.Column("ended", SMALL),
        sa.Column("key", TEXT),
        sa.Column("result", BYTES),
        _required("has_errors", SMALL),
        sqlite_with_rowid=False,
        postgresql_with={
            "fillfactor": 70,
            "autovacuum_vacuum_scale_factor": 0.02,
            "autovacuum_vacuum_threshold": 1000,
        },
    )
    span = "omnirelay_span"
    _index(
        f"{span}_ready",
        span,
        ["ns", sa.text("priority DESC"), "available_at", "first"],
        "state = 1 AND ready = 1",
    )
    _index(f"{span}_waiting", span, ["ns", "ready", "available_at", "first"], "state = 1 AND ready <> 1")
    _index(f"{span}_expiring", span, ["ns", "expires_at"], "state = 2")
    _index(f"{span}_aside", span, ["ns", "state", "first"], "state IN (4, 5)")
    _index(f"{span}_finished", span, ["ns", "available_at"], "state IN (3, 5)")
    _index(f"{span}_key", span, ["ns", "key", "first"], "key IS NOT NULL")
    op.create_table(
        "omnirelay_log",
        _key("ns", INT),
        _key("last"),
        _required("first", BIG),
        _required("at", BIG),
        _required("nonce", BIG),
        _required("document", BYTES),
    )
    op.create_table(
        "omnirelay_error",
        _key("ns", INT),
        _key("last"),
        _key("number"),
        _key("nth", INT),
        _required("first", BIG),
        _required("attempt", INT),
        _required("at", BIG),
        sa.Column("peer", TEXT),
        _required("error", TEXT),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "omnirelay_origin",
        _key("ns", INT),
        _key("queue_id", TEXT),
        _key("origin_id"),
        sa.Column("namespace", TEXT),
        _required("id", BIG),
        sa.UniqueConstraint("ns", "id", name="omnirelay_origin_here"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "omnirelay_reader",
        _key("ns", INT),
        _key("name", TEXT),
        _required("cursor", BIG),
        _required("updated_at", BIG),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    for table in ("reader", "origin", "error", "log", "span", "item", "head"):
        op.drop_table(f"omnirelay_{table}")
