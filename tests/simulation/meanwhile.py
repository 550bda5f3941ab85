"""Reading while things change. A reader takes no lock, so a change may come half way through; it must not trip over it,
skip anything or make anything up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lease_core.errors import EventsPruned
from tests.simulation import checks, faults, tending
from tests.simulation.site import Site

if TYPE_CHECKING:
    from tests.simulation.driver import History

KINDS = ("events", "dead", "drained", "inspect")


def read_while_things_change(history: History) -> None:
    site, random = history.main, history.random
    before, number = _states(site), site.audit.number
    kind = random.choice(KINDS)
    after = random.randrange(site.pruned, number + 1)
    changed: list[bool] = []

    def change() -> None:
        changed.append(True)
        _change_something(history)

    with faults.change_between_reads(site.queue, change, random.choice([1, 1, 1, 2])):
        try:
            found: Any = _reading(site, kind, after, list(before) or [1])()
        except EventsPruned as pruned:
            found = pruned
    if changed:
        history.fired("change during a read")
    history.note(f"meanwhile read {kind}: {type(found).__name__}")
    if isinstance(found, EventsPruned):
        checks.require(after < site.pruned, f"told that events after {after} are pruned, but they are not")
    elif kind == "events":
        expected = list(site.events_from(after)[: len(found)])
        checks.require(found == expected, f"events after {after} were skipped or made up")
        checks.require(bool(found) or after >= number, f"no events after {after}, though the log goes on to {number}")
    else:
        _judge_states(kind, found, before, _states(site))


def _states(site: Site) -> dict[int, str]:
    return {sequence_id: item.state for sequence_id, item in site.model.items.items()}


def _reading(site: Site, kind: str, after: int, ids: list[int]) -> Callable[[], Any]:
    queue = site.queue
    return {
        "events": lambda: queue.events(after=after, limit=20),
        "dead": queue.dead_letters,
        "drained": queue.drained,
        "inspect": lambda: queue.inspect(ids),
    }[kind]


def _change_something(history: History) -> None:
    """Preferably what hurts a reader most: taking away what it is about to read."""
    site = history.main
    dead = [item.id for item in site.model.in_state("dead")]
    kind = history.random.choice(["prune", "purge", "sweep", "anything"])
    if kind == "prune":
        history.call(tending.PruneEvents(site, "pruner", site.audit.number, None), None)
    elif kind == "purge" and dead:
        history.call(tending.PurgeDead(site, "purger", dead), None)
    elif kind == "sweep":
        history.call(tending.Sweep(site, "sweeper"), None)
    else:
        history.call(*history.next_call())


def _judge_states(kind: str, found: Any, before: dict[int, str], now: dict[int, str]) -> None:
    if kind == "inspect":
        for status in found:
            states = (before.get(status.sequence_id), now.get(status.sequence_id))
            checks.require(status.state in states, f"item {status.sequence_id} is {status.state}, never so: {states}")
        return
    ids = {pending.sequence_id for pending in found}
    possible = {i for states in (before, now) for i, state in states.items() if state == kind}
    certain = {i for i, state in before.items() if state == now.get(i) == kind}
    checks.require(certain <= ids <= possible, f"{kind} are {ids}; it should be {certain} at least, {possible} at most")
