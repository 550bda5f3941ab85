"""Whether a queue holds together, and agrees with what its workers knew for sure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from lease_core import LeaseEvent, LeaseQueue, LeaseToken
from lease_core.machine import State
from lease_core.store.base import Query
from tests.kills.journal import Call
from tests.kills.workers import flat

LOGGED_AS = {"complete": "Completed", "fail": "Failed", "release": "Released", "heartbeat": "Heartbeat"}
TABLES = ("head", "item", "span", "log", "error", "origin", "reader")


def all_events(queue: LeaseQueue) -> list[LeaseEvent]:
    events: list[LeaseEvent] = []
    while some := queue.events(after=events[-1].sequence_number if events else 0, limit=5_000):
        events.extend(some)
    return events


def everything(queue: LeaseQueue) -> list[list[tuple[Any, ...]]]:
    """Every row the namespace has in any table: what must be untouched by an operation that did not happen."""
    queries = [Query(f"SELECT * FROM omnirelay_{table} WHERE ns = ? ORDER BY 1, 2", (queue._ns,)) for table in TABLES]
    return [[tuple(row) for row in rows] for rows in queue._store.read(*queries)]


def check_queue(queue: LeaseQueue) -> list[LeaseEvent]:
    """The log is dense, tells a possible story for each item, and its story, the tables and the counters agree."""
    events = all_events(queue)
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    states = follow(events)
    stats = queue.stats()
    assert stats.head == len(events)
    told = Counter(states.values())
    counted = _recount(queue)
    for state in State:
        assert told[state] == counted[state], f"the log says {told[state]} {state.name}, the tables {counted[state]}"
    assert (stats.pending, stats.active, stats.dead, stats.completed) == (
        told[State.PENDING],
        told[State.LEASED],
        told[State.DEAD],
        told[State.COMPLETED],
    )
    if events:
        assert (events[-1].pending, events[-1].active) == (stats.pending, stats.active)
    return events


def follow(events: Iterable[LeaseEvent]) -> dict[int, State]:
    """Where each item stands after the events; fails where one of them could not have happened."""
    states: dict[int, State] = {}
    holder: dict[int, LeaseToken] = {}
    for event in events:
        item = event.sequence_id
        if item is None:
            continue
        state = states.get(item)
        match event.type:
            case "Enqueued":
                assert state is None, f"item {item} was enqueued twice"
                states[item] = State.PENDING
            case "LeaseGranted":
                assert state is State.PENDING, event
                assert event.token is not None
                assert event.token.fence == event.sequence_number, "a fence is the number of its grant"
                states[item], holder[item] = State.LEASED, event.token
            case "Heartbeat" | "Completed" | "Failed" | "Expired" | "Released":
                assert state is State.LEASED, event
                assert event.token == holder[item], "only the current holder is heard"
                states[item] = _after(event)
            case "DeadLettered":
                assert state is State.DEAD, event
            case other:
                raise AssertionError(f"no worker does {other}")
    return states


def _after(event: LeaseEvent) -> State:
    match event.type:
        case "Heartbeat":
            return State.LEASED
        case "Completed":
            return State.COMPLETED
        case "Released":
            return State.PENDING
    return State.PENDING if event.requeued else State.DEAD


def _recount(queue: LeaseQueue) -> Counter[State]:
    [spans, [(items,)]] = queue._store.read(
        Query("SELECT state, first, last FROM omnirelay_span WHERE ns = ? ORDER BY first", (queue._ns,)),
        Query("SELECT count(*) FROM omnirelay_item WHERE ns = ?", (queue._ns,)),
    )
    counted: Counter[State] = Counter()
    end = 0
    for state, first, last in spans:
        assert end < first <= last, "spans never overlap"
        counted[State(state)] += last - first + 1
        end = last
    assert items == counted.total(), "every item stands somewhere"
    return counted


def check_journals(events: list[LeaseEvent], calls: list[Call]) -> Counter[str]:
    """What was acknowledged is in the log once; what was not is there as a whole or not at all.

    Gives how many calls of each kind were acknowledged, and how many of those that were not had happened.
    """
    enqueued: dict[str, int] = {}
    logged: dict[str, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for event in events:
        if event.type == "Enqueued":
            assert event.item is not None
            assert event.sequence_id is not None
            assert event.item.request_id is not None
            assert event.item.request_id not in enqueued, "a request was accepted twice"
            enqueued[event.item.request_id] = event.sequence_id
        elif event.token is not None:
            logged[event.type][tuple(flat(event.token))] += 1
    for kind in ("LeaseGranted", "Completed", "Failed", "Released", "Expired"):
        assert all(times == 1 for times in logged[kind].values()), f"{kind} is in the log twice"
    seen: Counter[str] = Counter()
    for call in calls:
        if call.operation == "enqueue":
            found = [enqueued.get(request) for request in call.given]
        else:
            tokens = call.given if call.answer is None else call.answer
            kind = LOGGED_AS.get(call.operation, "LeaseGranted")
            found = [token if logged[kind][tuple(token)] else None for token in tokens]
        if call.answer is not None:
            assert found == call.answer, f"an acknowledged {call.operation} is not in the log"
            seen[call.operation] += bool(call.answer)
        elif call.given:
            assert len({entry is None for entry in found}) == 1, f"half of one {call.operation} happened"
            seen["happened, unheard" if found[0] is not None else "left no trace"] += 1
    return seen


def finish(queue: LeaseQueue) -> None:
    """Lease and complete whatever is left, to the end."""
    while True:
        leases = queue.lease("the last one", limit=1_000, wait=queue.config.lease_duration * 2, duration=60)
        if not leases:
            break
        queue.complete(leases, atomic=True).raise_if_refused()
    stats = queue.stats()
    assert (stats.pending, stats.active, stats.dead) == (0, 0, 0)
