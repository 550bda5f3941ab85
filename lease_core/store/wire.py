"""Many prepared statements in one round trip, over psycopg's libpq wrapper.

psycopg's own pipeline mode waits on the socket after each statement that is sent; at one item a call that waiting
costs more than the database's work. Here everything is sent, then everything is received. Lists are converted here,
too: psycopg takes some two microseconds for each value in them, which is more than the server takes to store it, and
other writers wait meanwhile. Conversion of other values, errors, and the connection itself remain psycopg's.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Sequence
from itertools import islice
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer

Statement = tuple[str, Sequence[Any]]
Key = tuple[str, tuple[int, ...]]

_BINARY = 1
_DONE = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
_MAX_PREPARED = 400


class Wire:
    """Runs statements on one connection, preparing each the first time it is met."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self._prepared: dict[Key, bytes] = {}
        self._transformer = Transformer(connection)
        self._pgconn = connection.pgconn
        self._serial = 0
        self._poll = select.poll()
        self.busy = False  # stays set when an exchange was broken off: the connection is of no use then

    def exchange(self, statements: Sequence[Statement]) -> list[list[tuple[Any, ...]]]:
        """The rows of each statement. Raises the first error; the statements after it were not run then."""
        self.busy = True
        pgconn = self._pgconn
        pgconn.enter_pipeline_mode()
        sent = [self._send(sql, params) for sql, params in statements]
        pgconn.pipeline_sync()
        results = iter(self._receive())
        pgconn.exit_pipeline_mode()
        self.busy = False
        rows = []
        for at, (key, prepares) in enumerate(sent):
            for result in islice(results, 1 + prepares):
                if result.status not in _DONE:
                    self._forget([key, *(later for later, unprepared in sent[at + 1 :] if unprepared)])
                    raise psycopg.errors.error_from_result(result, encoding="utf-8")
            rows.append(self._rows(result))
        return rows

    def _forget(self, keys: Sequence[Key]) -> None:
        """Prepare these anew: after an error the server passes over all that was sent with it."""
        for key in keys:
            self._prepared.pop(key, None)

    def _send(self, sql: str, params: Sequence[Any]) -> tuple[Key, bool]:
        """Send one statement. Gives the key under which it is prepared, and whether it had to be just now."""
        values, types, formats = self._dumped(params) if params else ([], (), None)
        key = (sql, types)
        name = self._prepared.get(key)
        prepares = name is None
        if name is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()  # old ones stay with the server under names that are never used again
            self._serial += 1
            name = self._prepared[key] = b"omnirelay_%d" % self._serial
            self._pgconn.send_prepare(name, sql.encode(), types)
        self._pgconn.send_query_prepared(name, values, formats, result_format=_BINARY)
        return key, prepares

    def _dumped(self, params: Sequence[Any]) -> tuple[list[Any], tuple[int, ...], list[pq.Format]]:
        """The values as they travel, with their types and formats."""
        lists = [(place, dumped) for place, each in enumerate(params) if type(each) is list and (dumped := _list(each))]
        for place, _ in lists:
            params = [*params[:place], None, *params[place + 1 :]]
        convert = self._transformer
        values = list(convert.dump_sequence(params, [PyFormat.AUTO] * len(params)))
        types, formats = list(convert.types or ()), list(convert.formats or ())
        for place, (type_, data) in lists:
            values[place], types[place], formats[place] = data, type_, pq.Format.BINARY
        return values, tuple(types), formats

    def _rows(self, result: pq.abc.PGresult) -> list[tuple[Any, ...]]:
        if result.status != pq.ExecStatus.TUPLES_OK:
            return []
        self._transformer.set_pgresult(result, set_loaders=True, format=pq.Format.BINARY)
        return self._transformer.load_rows(0, result.ntuples, tuple)

    def _receive(self) -> list[pq.abc.PGresult]:
        """Everything up to the sync, sending what is still unsent while receiving, so that neither side can block."""
        pgconn = self._pgconn
        unsent = pgconn.flush()
        self._poll.register(pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
        results: list[pq.abc.PGresult] = []
        while True:
            while pgconn.is_busy():
                [(socket, happened)] = self._poll.poll()
                if happened & ~select.POLLOUT:
                    pgconn.consume_input()
                if unsent:
                    unsent = pgconn.flush()
                    self._poll.modify(socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            result = pgconn.get_result()
            if result is None:
                if pgconn.status == pq.ConnStatus.BAD:
                    raise psycopg.OperationalError("the connection was lost")
                continue
            if result.status == pq.ExecStatus.PIPELINE_SYNC:
                return results
            results.append(result)


_LENGTH = struct.Struct(">i").pack
_LENGTHS = [_LENGTH(length) for length in range(256)]
_NUMBER = struct.Struct(">q").pack
_NULL = _LENGTH(-1)
_TYPES = {int: (1016, 20), str: (1009, 25), bytes: (1001, 17)}  # PostgreSQL's own numbers of bigint, text and bytea
_LARGEST = 2**63 - 1


def _list(values: list[Any]) -> tuple[int, bytes] | None:
    """A list of numbers, texts or bytes as a PostgreSQL array, with its type; none of any other list."""
    there = [value for value in values if value is not None]
    kinds = set(map(type, there))
    if len(kinds) != 1 or (kind := kinds.pop()) not in _TYPES:
        return None
    if kind is int and (max(there) > _LARGEST or min(there) < -_LARGEST):
        return None
    list_type, value_type = _TYPES[kind]
    parts = [struct.pack(">5i", 1, len(there) < len(values), value_type, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
            continue
        data = value.encode() if kind is str else value if kind is bytes else _NUMBER(value)
        parts.append(_LENGTHS[len(data)] if len(data) < 256 else _LENGTH(len(data)))
        parts.append(data)
    return list_type, b"".join(parts)
