"""The calls of operators, readers and lookers-on: drain and restore, dead letters, sweeping, the log, and looking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from msgspec.structs import replace

from lease_core import LeaseQueue, PendingItem
from lease_core.errors import EventsPruned
from lease_core.model import ErrorRecord, Lease, LeaseEvent, to_datetime, to_micros
from tests.simulation import checks
from tests.simulation.model import SECOND, Item
from tests.simulation.operations import Judge, Operation, as_lease
from tests.simulation.site import Site

# Operators


@dataclass
class Drain(Operation):
    limit: int | None

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.drain(self.limit)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        model = self.site.model
        pending = model.count()["pending"]
        taken = [event.sequence_id or 0 for event in heard if event.type == "Drained"]
        due = pending if self.limit is None else min(self.limit, pending)
        checks.require(len(taken) == due, f"{len(taken)} were drained; it should be {due}")
        model.drain(taken)
        expected = [as_pending(self.site, model.items[i]) for i in taken]

        def judge(got: list[PendingItem]) -> None:
            plain = [_without_times(pending) for pending in got]
            checks.require(plain == expected, f"drained {plain}; it should be {expected}")

        return judge


def as_pending(site: Site, item: Item) -> PendingItem:
    return PendingItem(
        item.work,
        item.id,
        item.attempt,
        to_datetime(item.enqueued_at),
        item.errors[-1][1] if item.errors else None,
        item.token,
        item.state == "dead",
        site.namespace,
        site.model.queue_id,
        tuple(ErrorRecord(attempt, to_datetime(0), text, peer) for attempt, text, peer in item.errors),
    )


def _without_times(pending: PendingItem) -> PendingItem:
    """The same, but for when its errors happened."""
    return replace(pending, errors=tuple(replace(record, at=to_datetime(0)) for record in pending.errors))


@dataclass
class Restore(Operation):
    items: list[PendingItem]

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.restore(self.items)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        receipts = self.site.model.restore(self.items)
        return lambda got: checks.require(got == receipts, f"receipts are {got}; they should be {receipts}")


@dataclass
class RequeueDead(Operation):
    ids: list[int]

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.requeue_dead(self.ids)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        requeued = self.site.model.requeue_dead(self.ids)
        return lambda got: checks.require(got == requeued, f"requeued {got}; it should be {requeued}")


@dataclass
class PurgeDead(Operation):
    ids: list[int]

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.purge_dead(self.ids)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        purged = self.site.model.purge_dead(self.ids)
        return lambda got: checks.require(got == purged, f"purged {got}; it should be {purged}")


@dataclass
class Sweep(Operation):
    forgets: ClassVar[bool] = True

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.sweep()

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        model = self.site.model
        ended = model.expire()
        dead = sum(item.state == "dead" for item in ended)
        due = len(model.forgettable())
        expected = (len(ended), dead, due)

        def judge(got: Any) -> None:
            found = (got.expired, got.dead_lettered, got.forgotten)
            checks.require(found == expected, f"the sweep did {found}; it should be {expected}")

        return judge


# Readers of the log


@dataclass
class PruneEvents(Operation):
    before: int | None
    older_than: float | None
    silent: ClassVar[bool] = True

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.prune_events(before=self.before, older_than=self.older_than)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        site, upto = self.site, self._allowed()
        if site.model.died:  # between two of its steps, perhaps
            reached = checks.read_tables(site.queue).head.pruned
            checks.require(site.pruned <= reached <= upto, f"pruned up to {reached}; it should be {upto} at most")
            upto = reached
        site.pruned = upto
        return lambda got: checks.require(got == upto, f"pruned up to {got}; it should be {upto}")

    def _allowed(self) -> int:
        """Whole transactions from the beginning of the log that are old enough and that every reader has read."""
        site = self.site
        slowest = min(site.readers.values(), default=None)
        upto = site.pruned
        for last, at in site.transactions:
            if last <= upto:
                continue
            if self.before is not None and last >= self.before:
                break
            if self.older_than is not None and at > site.model.now - round(self.older_than * SECOND):
                break
            if slowest is not None and last > slowest:
                break
            upto = last
        return upto


@dataclass
class RegisterReader(Operation):
    reader: str
    after: int
    silent: ClassVar[bool] = True

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.register_reader(self.reader, self.after)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        site = self.site
        if self.reader not in site.readers:
            if self.after < site.pruned:
                raise EventsPruned(self.after, site.pruned + 1)
            site.readers[self.reader] = self.after
        stands = site.readers[self.reader]
        return lambda got: checks.require(got == stands, f"the reader stands at {got}; it should be {stands}")


@dataclass
class AdvanceReader(Operation):
    """A reader that has read on says so. It is repeated safely, and never moves back."""

    reader: str
    to: int
    silent: ClassVar[bool] = True

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.advance_reader(self.reader, self.to)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        readers = self.site.readers
        readers[self.reader] = max(readers[self.reader], self.to)
        return lambda got: None


@dataclass
class ReadEvents(Operation):
    after: int
    limit: int
    looks: ClassVar[bool] = True

    def perform(self, queue: LeaseQueue) -> Any:
        return queue.events(after=self.after, limit=self.limit)

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        site = self.site
        if self.after < site.pruned:
            raise EventsPruned(self.after, site.pruned + 1)
        expected = list(site.events_from(self.after)[: self.limit])
        return lambda got: checks.require(got == expected, f"events after {self.after} differ from those tailed")


# Lookers-on


@dataclass
class Look(Operation):
    """Everything that can be read without touching: numbers, dead letters, drained items, leases, single items."""

    looks: ClassVar[bool] = True

    def perform(self, queue: LeaseQueue) -> Any:
        ids = [*self.site.model.items, self.site.model.next_id]
        return {
            "stats": queue.stats(),
            "dead": queue.dead_letters(),
            "drained": queue.drained(),
            "leases": queue.leases(),
            "inspected": queue.inspect(ids),
        }

    def expect(self, heard: Sequence[LeaseEvent]) -> Judge:
        return self._judge

    def _judge(self, got: dict[str, Any]) -> None:
        model = self.site.model
        checks.stats_equal_recount(got["stats"], model, self.site.audit.number)
        for state in ("dead", "drained"):
            expected = [as_pending(self.site, i) for i in sorted(model.in_state(state), key=lambda i: i.id)]
            found = [_without_times(pending) for pending in got[state]]
            checks.require(found == expected, f"{state} are {found}; they should be {expected}")
        leases = sorted((as_lease(item) for item in model.in_state("leased")), key=_by_id)
        checks.require(sorted(got["leases"], key=_by_id) == leases, "the leases listed are not those held")
        checks.require(
            [status.sequence_id for status in got["inspected"]] == sorted(model.items), "inspect left some out"
        )
        for status in got["inspected"]:
            self._judge_status(status, model.items[status.sequence_id])

    def _judge_status(self, status: Any, item: Item) -> None:
        errors = [(record.attempt, record.error, record.peer_id) for record in status.errors]
        found = (status.state, status.item, status.attempt, status.token, status.result, errors)
        expected = (item.state, item.work, item.attempt, item.token, item.result, item.errors)
        checks.require(found == expected, f"item {item.id} is shown as {found}; it should be {expected}")
        end = None if status.expires_at is None else to_micros(status.expires_at)
        checks.require(end == item.expires_at, f"item {item.id} is shown to expire at {end}")


def _by_id(lease: Lease) -> int:
    return lease.token.sequence_id
