"""Letting go of what a hub has held for long enough, from the beginning of the merged order, in small transactions.

A reader that has a cursor is waited for. How far was pruned is kept as a cursor that no reader can have, so that
whoever asks for what is gone is told so, and nobody takes it for damage.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from lease_core.errors import EventsPruned
from lease_core.replication.codec import decode_event
from lease_core.replication.errors import UnreadableEvent
from lease_core.replication.hub.packing import unpack
from lease_core.replication.hub.schema import batches, cursors, heads, streams

_AT_ONCE = 100
_OWNER, _READER = "", ""  # a reader's name is never empty
_KEY = (cursors.c.owner == _OWNER, cursors.c.reader == _READER)


def pruned(connection: sa.Connection) -> int:
    """The last position that is gone."""
    return int(connection.scalar(sa.select(cursors.c.position).where(*_KEY)) or 0)


def prune_some(connection: sa.Connection, before: datetime) -> bool:
    """Delete some batches whose events are all from before that time and which every cursor has passed.

    To be called in a transaction that may write. Gives whether there may be more.
    """
    connection.execute(sa.select(heads.c.position).where(heads.c.id == 1).with_for_update())
    slowest = connection.scalar(sa.select(sa.func.min(cursors.c.position)).where(~sa.and_(*_KEY)))
    upto = gone = pruned(connection)
    found = connection.execute(sa.select(batches).order_by(batches.c.upto).limit(_AT_ONCE)).all()
    for row in found:
        if (slowest is not None and row.upto > slowest) or not _is_before(row, before):
            break
        upto = row.upto
    if upto == gone:
        return False
    connection.execute(sa.delete(batches).where(batches.c.upto <= upto))
    if not connection.execute(sa.update(cursors).where(*_KEY).values(position=upto)).rowcount:
        connection.execute(sa.insert(cursors).values(owner=_OWNER, reader=_READER, position=upto))
    return bool(upto == found[-1].upto)


def _is_before(row: Any, moment: datetime) -> bool:
    try:
        lines = unpack(row.packing, bytes(row.lines)).rstrip(b"\n")
        return decode_event(lines[lines.rfind(b"\n") + 1 :]).timestamp < moment
    except (ValueError, UnreadableEvent):
        return False  # damage is for somebody to look at


def check_position(connection: sa.Connection, after: int) -> None:
    """Refuse to read the merged order from a position whose successor is gone."""
    if after < (upto := pruned(connection)):
        raise EventsPruned(after, upto + 1)


def check_number(connection: sa.Connection, source: str, namespace: str, after: int) -> None:
    """The same for the numbers of one source."""
    if not pruned(connection):
        return
    stream = connection.execute(
        sa.select(streams).where(streams.c.source == source, streams.c.namespace == namespace)
    ).one_or_none()
    if stream is None:
        return
    held = connection.scalar(sa.select(sa.func.min(batches.c.first)).where(batches.c.stream == stream.id))
    oldest = int(stream.last) + 1 if held is None else int(held)
    if max(after, int(stream.first) - 1) < oldest - 1:
        raise EventsPruned(after, oldest)
