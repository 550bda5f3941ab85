"""Handing back what was leased when a copy took over."""

from __future__ import annotations

from itertools import chain

from lease_core import payload
from lease_core.machine import Claim, Moved, Release, Span, decide
from lease_core.store import selects
from lease_core.store.base import Query, Store
from lease_core.unit import Unit, run

_AT_ONCE = 500
_LEASED = (
    f"SELECT {selects.SPAN_COLUMNS} FROM omnirelay_span WHERE ns = ? AND state = 2 AND fence <= ? "
    "ORDER BY expires_at LIMIT ?"
)


def hand_back(store: Store, ns: int, upto: int) -> None:
    """Release every lease that was granted up to event ``upto``, without burning an attempt.

    Most have run out by the time a queue is rebuilt, and a lease that has run out cannot be released. Nobody could hold
    on to them, though, while there was no queue. So they are released as of the last moment at which they were good.
    """
    while run(store, ns, lambda unit: _hand_back_some(unit, upto)):
        pass


def _hand_back_some(unit: Unit, upto: int) -> bool:
    unit.fetch()
    [rows] = unit.fetch(Query(_LEASED, (unit.ns, upto, _AT_ONCE)))
    spans = unit.load(rows)
    if not spans:
        return False
    ended = _ends(spans[0]) <= unit.now
    spans = [span for span in spans if (_ends(span) <= unit.now) == ended]
    ranges = selects.merged(sorted((span.first, span.last) for span in spans))
    found = chain.from_iterable(unit.fetch(*selects.items(unit.store, unit.ns, ranges, selects.NAME_COLUMNS)))
    names = {row[0]: payload.to_name(row) for row in found}
    unit.now = min(unit.now, _ends(spans[0]) - 1)
    for span in spans:
        outcome = decide(span, Release(Claim(span.attempt, span.lease_id or "", span.fence)), unit.now)
        assert isinstance(outcome, Moved), outcome
        unit.apply(span, outcome, names.__getitem__)
    return True


def _ends(span: Span) -> int:
    assert span.expires_at is not None
    return span.expires_at
