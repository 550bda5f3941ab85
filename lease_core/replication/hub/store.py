"""What the hub holds. A batch is one row, stored as it came, and sealed to the one before it from the same source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy as sa

from lease_core.replication.errors import CorruptCopy
from lease_core.replication.hub.admission import Offer, Verdict, first_difference
from lease_core.replication.hub.packing import pack_all, unpack, zstandard
from lease_core.replication.hub.retention import check_number, check_position, prune_some, pruned
from lease_core.replication.hub.schema import batches, cursors, heads, make_tables, open_database, streams
from lease_core.replication.sealed import Seal
from lease_core.replication.sinks.sql import insert_statement

_PAGE_BYTES = 1 << 20
_PAGE_ROWS = 256


@dataclass(frozen=True)
class End:
    """How far one source has come in one namespace."""

    stream: int
    source: str
    namespace: str
    first: int
    last: int
    sha256: str


@dataclass(frozen=True)
class Held:
    """A batch as it is held. ``position`` is the place of its first event in the merged order."""

    source: str
    position: int
    seal: Seal
    lines: bytes


@dataclass(frozen=True)
class _Statements:
    """What appending says to the database, made once: each commit says it again."""

    lock_head: str
    add_batches: str
    move_streams: str
    move_head: str

    @classmethod
    def of(cls, engine: sa.Engine) -> _Statements:
        mark = "%s" if engine.dialect.name == "postgresql" else "?"
        lock = " FOR UPDATE" if engine.dialect.name == "postgresql" else ""  # SQLite's writers take turns anyway
        return cls(
            f"SELECT position FROM {heads.name} WHERE id = 1{lock}",
            insert_statement(engine, batches),
            f"UPDATE {streams.name} SET last = {mark}, sha256 = {mark} WHERE id = {mark}",
            f"UPDATE {heads.name} SET position = {mark} WHERE id = 1",
        )


@dataclass
class _Group:
    """One transaction that appends."""

    connection: sa.Connection
    head: int
    moved: dict[int, End] = field(default_factory=dict)
    rows: list[tuple[Any, ...]] = field(default_factory=list)


class HubStore:
    """The database. ``append`` is for one thread at a time; the rest may be called from anywhere.

    Several hubs may share a database: the head row is locked by whoever appends, and tells whether another one has
    appended meanwhile.
    """

    def __init__(self, url: str | sa.URL) -> None:
        zstandard()  # without which nothing could be stored
        self._engine = open_database(url)
        make_tables(self._engine)
        self._writer = self._engine.execution_options(omnirelay_writes=True)
        self._statements = _Statements.of(self._engine)
        self._head = -1
        self._ends: dict[tuple[str, str], End] = {}

    def close(self) -> None:
        self._engine.dispose()

    # Appending

    def append(self, offers: Sequence[Offer]) -> list[Verdict]:
        """Store what can be stored, in one transaction that is durable on return. Either all verdicts hold or none."""
        packed = pack_all([offer.lines for offer in offers])  # before anything is locked
        try:
            with self._writer.begin() as connection:
                head = connection.exec_driver_sql(self._statements.lock_head).scalar()
                if head != self._head:
                    self._ends.clear()
                group = _Group(connection, int(head or 0))
                before = group.head
                verdicts = [self._admit(group, offer, how) for offer, how in zip(offers, packed, strict=True)]
                self._write_rows(group)
                if group.head != before:
                    moved = [(end.last, end.sha256, end.stream) for end in group.moved.values()]
                    connection.exec_driver_sql(self._statements.move_streams, moved)
                    connection.exec_driver_sql(self._statements.move_head, (group.head,))
        except BaseException:
            self._head = -1  # what is remembered may not be so
            raise
        self._head = group.head
        return verdicts

    def _admit(self, group: _Group, offer: Offer, packed: tuple[int, bytes]) -> Verdict:
        end = self._end(group.connection, offer.source, offer.namespace)
        if end is None:
            if offer.first > 1 and not offer.begins:
                return Verdict("MISSING", 1, f"events 1 to {offer.first - 1} have not arrived")
            end = self._new(group, offer)
        if offer.first > end.last + 1:
            said = f"events {end.last + 1} to {offer.first - 1} have not arrived"
            return Verdict("MISSING", end.last + 1, said)
        if offer.first < end.first:
            return Verdict("INVALID", end.last + 1, f"the hub's copy begins at event {end.first}")
        if offer.first <= end.last:
            self._write_rows(group)  # which may have some of what is compared
            try:
                differs = self._difference(group.connection, end, offer)
            except ValueError:  # of this source alone: others are stored meanwhile
                return Verdict("UNAVAILABLE", 0, f"what the hub holds of {offer.source} is damaged: omnirelay verify")
            if differs:
                said = f"the hub holds another event {differs} of {offer.source}"
                return Verdict("REWRITES_HISTORY", end.last + 1, said, differs)
            if offer.last <= end.last:
                return Verdict("STORED", end.last + 1)
            offer = offer.above(end.last)
            (packed,) = pack_all([offer.lines])
        return self._insert(group, end, offer, packed)

    def _insert(self, group: _Group, end: End, offer: Offer, packed: tuple[int, bytes]) -> Verdict:
        count = offer.last - offer.first + 1
        seal = Seal(offer.namespace, offer.first, offer.last, count, end.sha256).over_digest(offer.digest)
        group.head += count
        size = len(offer.lines)
        row = (group.head, end.stream, offer.first, offer.last, seal.previous, seal.sha256, size, *packed)
        group.rows.append(row)
        end = replace(end, last=offer.last, sha256=seal.sha256)
        self._ends[end.source, end.namespace] = group.moved[end.stream] = end
        return Verdict("STORED", end.last + 1, stored=count)

    def _write_rows(self, group: _Group) -> None:
        if group.rows:
            group.connection.exec_driver_sql(self._statements.add_batches, group.rows)
            group.rows = []

    def _new(self, group: _Group, offer: Offer) -> End:
        values = {
            "source": offer.source,
            "namespace": offer.namespace,
            "first": offer.first,
            "last": offer.first - 1,
            "sha256": "",
        }
        made = group.connection.execute(sa.insert(streams), values).inserted_primary_key
        assert made is not None
        return End(made[0], offer.source, offer.namespace, offer.first, offer.first - 1, "")

    def _difference(self, connection: sa.Connection, end: End, offer: Offer) -> int | None:
        """The first event of the offer that the hub holds otherwise."""
        last = min(offer.last, end.last)
        found = connection.execute(
            sa.select(batches.c.first, batches.c.packing, batches.c.lines)
            .where(batches.c.stream == end.stream, batches.c.last >= offer.first, batches.c.first <= last)
            .order_by(batches.c.last)
        ).all()
        if not found:
            return None  # pruned
        first = max(offer.first, found[0].first)  # what comes before it may be pruned
        held = b"".join(unpack(row.packing, bytes(row.lines)) for row in found).split(b"\n")
        skip = first - found[0].first
        offered = offer.lines.split(b"\n")[first - offer.first : last - offer.first + 1]
        return first_difference(b"\n".join(held[skip : skip + len(offered)]), b"\n".join(offered), first)

    def _end(self, connection: sa.Connection, source: str, namespace: str) -> End | None:
        known = self._ends.get((source, namespace))
        if known is None and (found := _find(connection, source, namespace)):
            known = self._ends[source, namespace] = found
        return known

    # Reading

    def head(self) -> int:
        """The position of the last event in the merged order."""
        with self._engine.connect() as connection:
            return int(connection.scalar(sa.select(heads.c.position)) or 0)

    def ends(self) -> list[End]:
        """Every source and namespace, by name."""
        with self._engine.connect() as connection:
            found = connection.execute(sa.select(streams).order_by(streams.c.source, streams.c.namespace))
            return [_as_end(row) for row in found]

    def end(self, source: str, namespace: str) -> End | None:
        with self._engine.connect() as connection:
            return _find(connection, source, namespace)

    def page(self, source: str, namespace: str, after: int) -> list[Held]:
        """The next batches of one source that have events above number ``after``: about a megabyte, at least one."""
        matching = (streams.c.source == source, streams.c.namespace == namespace, batches.c.last > after)
        return self._page(
            matching, batches.c.last, partial(check_number, source=source, namespace=namespace, after=after)
        )

    def merged(self, after: int, source: str = "", namespace: str = "") -> list[Held]:
        """The same in the merged order, from position ``after`` on."""
        matching = [batches.c.upto > after]
        if source:
            matching.append(streams.c.source == source)
        if namespace:
            matching.append(streams.c.namespace == namespace)
        return self._page(matching, batches.c.upto, partial(check_position, after=after))

    def _page(
        self,
        matching: Sequence[sa.ColumnElement[bool]],
        order: sa.ColumnElement[int],
        check: Callable[[sa.Connection], None],
    ) -> list[Held]:
        join = batches.join(streams, batches.c.stream == streams.c.id)
        with self._engine.connect() as connection:
            sizes = connection.execute(
                sa.select(batches.c.size).select_from(join).where(*matching).order_by(order).limit(_PAGE_ROWS)
            ).scalars()
            rows = _fitting(sizes.all())
            if not rows:
                check(connection)
                return []
            found = connection.execute(
                sa.select(batches, streams.c.source, streams.c.namespace)
                .select_from(join).where(*matching).order_by(order).limit(rows)
            ).all()  # fmt: skip
            check(connection)  # at last, so that nothing can have been pruned since
        return _undamaged(found)

    # Letting go

    def prune(self, before: datetime) -> int:
        """Let go of events from before that time, as far as no cursor waits for them. Gives the last position gone.

        For the thread that appends.
        """
        more = True
        while more:
            with self._writer.begin() as connection:
                more = prune_some(connection, before)
        with self._engine.connect() as connection:
            return pruned(connection)

    # Cursors

    def cursor(self, owner: str, reader: str) -> int:
        with self._engine.connect() as connection:
            kept = sa.select(cursors.c.position).where(cursors.c.owner == owner, cursors.c.reader == reader)
            return int(connection.scalar(kept) or 0)

    def keep_cursor(self, owner: str, reader: str, position: int) -> int:
        """Keep that the reader has come so far. Never moves back; gives what is kept."""
        key = (cursors.c.owner == owner, cursors.c.reader == reader)
        with self._writer.begin() as connection:
            moved = connection.execute(
                sa.update(cursors).where(*key, cursors.c.position < position).values(position=position)
            )
            if moved.rowcount:
                return position
            kept = connection.scalar(sa.select(cursors.c.position).where(*key))
            if kept is None:
                connection.execute(sa.insert(cursors).values(owner=owner, reader=reader, position=position))
            return position if kept is None else int(kept)


def _fitting(sizes: Sequence[int]) -> int:
    """How many rows make a page."""
    total = 0
    for rows, size in enumerate(sizes):
        total += size
        if rows and total > _PAGE_BYTES:
            return rows
    return len(sizes)


def _find(connection: sa.Connection, source: str, namespace: str) -> End | None:
    row = connection.execute(
        sa.select(streams).where(streams.c.source == source, streams.c.namespace == namespace)
    ).one_or_none()
    return None if row is None else _as_end(row)


def _as_end(row: Any) -> End:
    return End(row.id, row.source, row.namespace, int(row.first), int(row.last), row.sha256)


def _undamaged(rows: Sequence[Any]) -> list[Held]:
    """The batches up to the first that is damaged, which the next page then begins with, and fails."""
    good: list[Held] = []
    for row in rows:
        try:
            good.append(_as_held(row))
        except CorruptCopy:
            if not good:
                raise
            break
    return good


def _as_held(row: Any) -> Held:
    """The batch of a row, if it still is what was stored."""
    count = row.last - row.first + 1
    seal = Seal(row.namespace, row.first, row.last, count, row.previous, row.sha256)
    try:
        lines = unpack(row.packing, bytes(row.lines))
    except ValueError:
        lines = b""
    if not seal.holds(lines):
        said = f"a batch of {row.source}/{row.namespace} is not what was stored"
        raise CorruptCopy(batches.name, said, row.first - 1)
    return Held(row.source, row.upto - count + 1, seal, lines)
