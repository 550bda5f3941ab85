"""Holding the tables, the model and the log against each other. Each check raises ``Violation``, or is content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from lease_core import LeaseQueue
from lease_core.model import AckResult, LeaseEvent, LeaseToken, QueueStats
from lease_core.payload import to_item
from lease_core.replay import Replica
from lease_core.store.base import HEAD_COLUMNS, Head, Query, Row
from lease_core.store.selects import ITEM_COLUMNS
from tests.simulation.audit import Audit
from tests.simulation.model import Item, Model, Violation

STATES = {1: "pending", 2: "leased", 3: "completed", 4: "dead", 5: "drained"}
ENDS = {None: None, 1: "failed", 2: "released", 3: "expired"}
BLOCKED, READY = 0, 1

_SPAN = (
    "first, last, state, ready, priority, available_at, attempt, lease_id, owner, fence, expires_at, ended, key, "
    "result, has_errors"
)


class Standing(NamedTuple):
    """How the tables say that one item stands. One row of the span table, seen from one of its items."""

    state: str
    ready: int
    priority: int
    since: int
    attempt: int
    token: LeaseToken | None
    owner: str | None
    expires_at: int | None
    ended: str | None
    key: str | None
    result: Any
    has_errors: bool


class Tables(NamedTuple):
    head: Head
    standing: dict[int, Standing]
    items: dict[int, Row]
    errors: list[Row]
    log: list[Row]
    origins: set[int]


def read_tables(queue: LeaseQueue) -> Tables:
    ns = (queue._ns,)
    head, spans, items, errors, log, origins = queue._store.read(
        Query(f"SELECT {HEAD_COLUMNS} FROM omnirelay_head WHERE ns = ?", ns),
        Query(f"SELECT {_SPAN} FROM omnirelay_span WHERE ns = ? ORDER BY first", ns),
        Query(f"SELECT {ITEM_COLUMNS} FROM omnirelay_item WHERE ns = ?", ns),
        Query("SELECT first, last, attempt, peer, error FROM omnirelay_error WHERE ns = ? ORDER BY number, nth", ns),
        Query("SELECT first, last FROM omnirelay_log WHERE ns = ? ORDER BY last", ns),
        Query("SELECT id FROM omnirelay_origin WHERE ns = ?", ns),
    )
    standing = _expand(spans)
    return Tables(Head(*head[0]), standing, {row[0]: row for row in items}, errors, log, {row[0] for row in origins})


def _expand(spans: list[Row]) -> dict[int, Standing]:
    """The span table item by item; rows that overlap are an error in themselves."""
    standing: dict[int, Standing] = {}
    before = 0
    for first, last, state, ready, priority, since, attempt, lease, owner, fence, *rest in spans:
        expires_at, ended, key, result, has_errors = rest
        _require(first > before, f"the span from {first} overlaps the one before it, which ends at {before}")
        _require(last >= first, f"the span from {first} ends before it begins")
        before = last
        leased_attempt = attempt + (ended == 2)
        for offset in range(last - first + 1):
            token = None if lease is None else LeaseToken(first + offset, leased_attempt, lease, fence + offset)
            standing[first + offset] = Standing(
                STATES[state],
                ready,
                priority,
                since,
                attempt,
                token,
                owner,
                expires_at,
                ENDS[ended],
                key,
                None if result is None else msgspec.json.decode(result),
                bool(has_errors),
            )
    return standing


def tables_are_sound(tables: Tables, model: Model, audit: Audit) -> None:
    """Everything that must hold between two calls."""
    spans_cover_items(tables)
    log_is_dense(tables, audit)
    counters_are_right(tables, model, audit)
    _same_ids("model", set(model.items), tables)
    by_item = _errors_by_item(tables)
    for sequence_id, item in model.items.items():
        item_is_as_modelled(item, tables, by_item.get(sequence_id, []))
        item_is_as_replayed(sequence_id, tables, audit)
    for sequence_id in set(audit.items) - set(tables.items):
        state = audit.items[sequence_id].state
        if state not in ("completed", "drained"):
            raise Violation(f"item {sequence_id} is lost: the log has it as {state}")
    errors_belong_to_somebody(tables)
    _require(tables.origins <= set(tables.items), "an origin is recorded of an item that is gone")


def spans_cover_items(tables: Tables) -> None:
    _same_ids("item table", set(tables.items), tables)


def _same_ids(what: str, ids: set[int], tables: Tables) -> None:
    standing = set(tables.standing)
    _require(
        ids == standing,
        f"{what} and span table disagree: {sorted(ids - standing)[:5]} have no span, "
        f"{sorted(standing - ids)[:5]} have nothing but a span",
    )


def log_is_dense(tables: Tables, audit: Audit) -> None:
    number = tables.head.pruned
    for first, last in tables.log:
        if first != number + 1 or last < first:
            raise Violation(f"log row {first} to {last} follows number {number}")
        number = last
    _require(number == tables.head.number, f"the log ends at {number}, the head row says {tables.head.number}")
    _require(number == audit.number, f"a reader has read up to {audit.number}, but the log ends at {number}")


def counters_are_right(tables: Tables, model: Model, audit: Audit) -> None:
    head, count = tables.head, model.count()
    recount = dict.fromkeys(STATES.values(), 0)
    for standing in tables.standing.values():
        recount[standing.state] += 1
    told = (head.pending, head.active, head.dead)
    _require(
        told == (recount["pending"], recount["leased"], recount["dead"]),
        f"the head row counts {told}, the spans are {recount}",
    )
    _require(told == (count["pending"], count["leased"], count["dead"]), f"head row {told}, model {count}")
    _require((audit.pending, audit.active) == told[:2], "the log's depths differ from the head row's")
    _require(head.completed == model.completed == audit.completed, f"completed: {head.completed} counted")
    _require(head.next_id == model.next_id, f"next id is {head.next_id}, not {model.next_id}")
    _require(
        bool(head.backpressure) == model.backpressure == audit.backpressure,
        f"backpressure: head {head.backpressure}, model {model.backpressure}, log {audit.backpressure}",
    )


def item_is_as_modelled(item: Item, tables: Tables, errors: list[tuple[int, str, str | None]]) -> None:
    found, row = tables.standing[item.id], tables.items[item.id]
    finished = item.state in ("completed", "dead", "drained")
    expected = found._replace(
        state=item.state,
        priority=item.work.priority,
        since=item.finished_at if finished else item.available_at,
        attempt=item.attempt,
        token=item.token,
        owner=item.owner,
        expires_at=item.expires_at,
        ended=item.ended,
        result=item.result,
        has_errors=bool(item.errors),
    )
    if found != expected:
        _tell_difference(f"item {item.id}", found, expected, "it should be")
    if row[7] != item.enqueued_at or to_item(row, found.priority) != item.work:
        raise Violation(f"item {item.id} is stored as {row}; it should be {item.work}, enqueued at {item.enqueued_at}")
    if (found.key is None) != (item.key is None):
        raise Violation(f"item {item.id} has the key {found.key!r}; it should be {item.key!r}")
    if item.state == "pending" and item.key is not None and (found.ready != BLOCKED) != item.offered:
        raise Violation(f"item {item.id} is {'' if found.ready else 'not '}offered, against the order of its key")
    if errors != item.errors:
        raise Violation(f"item {item.id} has the errors {errors}; it should be {item.errors}")


def item_is_as_replayed(sequence_id: int, tables: Tables, audit: Audit) -> None:
    found, row, told = tables.standing[sequence_id], tables.items[sequence_id], audit.items.get(sequence_id)
    if told is None:
        raise Violation(f"item {sequence_id} is in the tables, but not in the log")
    expected = found._replace(
        state=told.state,
        since=told.since,
        attempt=told.attempt,
        token=told.token,
        owner=told.owner,
        expires_at=told.expires_at,
        result=told.result,
        has_errors=bool(told.errors),
    )
    if found != expected:
        _tell_difference(f"item {sequence_id}", found, expected, "replaying the log gives")
    if row[7] != told.enqueued_at or to_item(row, found.priority) != told.work:
        raise Violation(f"item {sequence_id} is stored as {row}; replaying the log gives {told.work}")


def own_replay_agrees(tables: Tables, replica: Replica) -> None:
    """The queue's own replay of its log gives the tables too, but for items that it has forgotten since."""
    for sequence_id, found in tables.standing.items():
        span = replica.spans[sequence_id]
        told = (span.state.name.lower(), span.priority, span.available_at, span.attempt, span.owner, span.expires_at)
        kept = (found.state, found.priority, found.since, found.attempt, found.owner, found.expires_at)
        _require(told == kept, f"item {sequence_id} is {kept}; the queue's own replay gives {told}")
        token = found.token
        lease = (token.lease_id, token.attempt, token.fence) if token else (None, span.leased_attempt, 0)
        own = (span.lease_id, span.leased_attempt, span.fence)
        _require(own == lease, f"item {sequence_id} has the lease {lease}; the queue's own replay gives {own}")
        item = to_item(tables.items[sequence_id], found.priority)
        _require(replica.items[sequence_id] == item, f"item {sequence_id} differs in the queue's own replay")


def _tell_difference(what: str, found: Standing, expected: Standing, should: str) -> None:
    for field in found._fields:
        actual, right = getattr(found, field), getattr(expected, field)
        if actual != right:
            raise Violation(f"{what} has {field} {actual!r}; {should} {right!r}")


def _errors_by_item(tables: Tables) -> dict[int, list[tuple[int, str, str | None]]]:
    found: dict[int, list[tuple[int, str, str | None]]] = {}
    for first, last, attempt, peer, error in tables.errors:
        for sequence_id in range(first, last + 1):
            found.setdefault(sequence_id, []).append((attempt, error, peer))
    return found


def errors_belong_to_somebody(tables: Tables) -> None:
    for first, last, *_ in tables.errors:
        if not all(sequence_id in tables.items for sequence_id in range(first, last + 1)):
            raise Violation(f"the error of items {first} to {last} has outlived some of them")


def events_are_as_told(told: list[dict[str, Any]], heard: Sequence[LeaseEvent]) -> None:
    """The log says what the model says. Neighbours may be told in any order, each item's story and grants may not."""
    granted = [event["sequence_id"] for event in told if event["type"] == "LeaseGranted"]
    actual = [event.sequence_id for event in heard if event.type == "LeaseGranted"]
    _require(granted == actual, f"leased in the order {actual}, it should be {granted}")
    expected = sorted(told, key=lambda event: _last_if_none(event["sequence_id"]))
    found = sorted(heard, key=lambda event: _last_if_none(event.sequence_id))
    kinds = [(event["type"], event["sequence_id"]) for event in expected]
    actual_kinds = [(event.type, event.sequence_id) for event in found]
    _require(kinds == actual_kinds, f"the log says {actual_kinds}, it should say {kinds}")
    for event, logged in zip(expected, found, strict=True):
        for field, value in event.items():
            if getattr(logged, field) != value:
                name = f"event {logged.sequence_number} ({logged.type})"
                raise Violation(f"{name} has {field} {getattr(logged, field)!r}; it should be {value!r}")


def _last_if_none(sequence_id: int | None) -> float:
    return float("inf") if sequence_id is None else sequence_id


def one_moment(heard: Sequence[LeaseEvent]) -> None:
    _require(len({event.timestamp for event in heard}) <= 1, "the events of one call bear different times")


def acknowledged_as_expected(
    result: AckResult, accepted: list[LeaseToken], refused: list[tuple[LeaseToken, str]], model: Model
) -> None:
    _require(list(result.accepted) == accepted, f"accepted {result.accepted}; it should be {accepted}")
    found = [(refusal.token, refusal.code) for refusal in result.refused]
    _require(found == refused, f"refused {found}; it should be {refused}")
    _require(all(refusal.reason for refusal in result.refused), "a refusal gives no reason")
    count = model.count()
    depth = (count["pending"], count["leased"])
    _require((result.pending, result.active) == depth, f"told depth {result.pending}, {result.active}; not {depth}")


def stats_equal_recount(stats: QueueStats, model: Model, head: int) -> None:
    count = model.count()
    waiting = [item for item in model.items.values() if model.can_be_leased(item)]
    oldest = min((item.available_at for item in waiting), default=None)
    pending = model.in_state("pending")
    least = sum(item.available_at > model.latest for item in pending)
    most = sum(item.available_at > model.now for item in pending)
    _require(least <= stats.delayed <= most, f"{stats.delayed} are delayed; it should be {least} to {most}")
    expected = QueueStats(
        pending=count["pending"],
        active=count["leased"],
        delayed=stats.delayed,
        dead=count["dead"],
        oldest_pending_age=None if oldest is None else (model.now - oldest) / 1_000_000,
        backpressure=model.backpressure,
        head=head,
        completed=model.completed,
    )
    _require(stats == expected, f"stats are {stats}; they should be {expected}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation(problem)


require = _require
