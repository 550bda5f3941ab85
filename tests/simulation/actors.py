"""Who calls what: producers, workers, operators and a reader, each with the little that it knows.

Actors only know what the queue told them. A worker whose lease call crashed holds nothing; an operator whose drain
crashed looks into ``drained``; nobody but the checks sees the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Any

from lease_core import Lease, LeaseToken, PendingItem, WorkItem
from lease_core.model import to_datetime
from tests.simulation import operations as op
from tests.simulation import tending
from tests.simulation.scenario import Scenario
from tests.simulation.site import Site


@dataclass
class Producer:
    name: str
    scenario: Scenario
    random: Random
    asked: list[str] = field(default_factory=list)
    made: int = 0

    def act(self, site: Site) -> op.Operation:
        items = [self._item(site) for _ in range(self.random.randint(1, self.scenario.largest_batch))]
        if self.random.random() < 0.1:
            return op.EnqueueInMyTransaction(site, self.name, items, commits=self.random.random() < 0.6)
        return op.Enqueue(site, self.name, items)

    def _item(self, site: Site) -> WorkItem:
        random = self.random
        plain = random.random() < 0.5
        return WorkItem(
            "file" if random.random() < 0.9 else "table",
            f"r{random.randrange(self.scenario.resources)}",
            random.choice([None, f"p{random.randrange(self.scenario.partitions)}"]),
            {} if plain else {"made by": self.name},
            b"" if plain else bytes([random.randrange(256)]) * random.randrange(4),
            random.choice([None, None, "json"]),
            self._request(),
            0 if random.random() < 0.6 else random.randint(-2, 2),
            None if random.random() < 0.75 else self._later(site),
        )

    def _request(self) -> str | None:
        random = self.random
        if random.random() < 0.6:
            return None
        if self.asked and random.random() < 0.3:
            return random.choice(self.asked[-20:])
        self.made += 1
        self.asked.append(f"{self.name}-{self.made}")
        return self.asked[-1]

    def _later(self, site: Site) -> Any:
        return to_datetime(site.clock.micros) + timedelta(seconds=self.random.choice([-1.0, 0.0, 0.5, 3.0, 20.0]))


@dataclass
class Worker:
    name: str
    site: Site
    scenario: Scenario
    random: Random
    held: list[Lease] = field(default_factory=list)
    spent: list[LeaseToken] = field(default_factory=list)  # tokens it has used before
    asleep_until: int = 0

    @property
    def asleep(self) -> bool:
        return self.site.clock.micros < self.asleep_until

    def act(self) -> op.Operation:
        random = self.random
        if not self.held or random.random() < 0.3:
            return self.lease()
        tokens = self._some()
        match random.choices(["heartbeat", "complete", "fail", "release"], [3, 5, 3, 1])[0]:
            case "heartbeat":
                return op.Heartbeat(self.site, self.name, tokens, random.choice([None, None, 0.0, 0.3, 20.0]))
            case "complete":
                return self._complete(tokens)
            case "fail":
                delay = random.choice([None, None, 0.0, 1.5])
                error = f"error {random.randrange(100)}"
                return op.Fail(self.site, self.name, tokens, error, random.random() < 0.85, delay)
            case _:
                return op.Release(self.site, self.name, tokens)

    def lease(self) -> op.Operation:
        limit = self.random.randint(1, 2 * self.scenario.largest_batch)
        duration = self.random.choice([None, None, None, 0.001, 0.7, 10.0])
        return op.LeaseSome(self.site, self.name, limit, duration, upkeep=self.random.random() < 0.1)

    def _complete(self, tokens: list[LeaseToken]) -> op.Operation:
        random = self.random
        result = random.choice([None, {"uri": f"s3://{random.randrange(9)}"}, 0, "done"])
        if random.random() < 0.3:
            result = [random.choice([None, position, {"n": position}]) for position in range(len(tokens))]
        return op.Complete(self.site, self.name, tokens, result, random.random() < 0.4)

    def _some(self) -> list[LeaseToken]:
        """Some of what it holds, in any order, sometimes one of them twice."""
        tokens = [lease.token for lease in self.held]
        chosen = self.random.sample(tokens, self.random.randint(1, len(tokens)))
        if self.random.random() < 0.5:
            chosen.sort(key=lambda token: token.sequence_id)
        if self.random.random() < 0.05:
            chosen.append(self.random.choice(chosen))
        return chosen

    def hears(self, operation: op.Operation, answer: Any) -> None:
        if isinstance(operation, op.LeaseSome):
            self.held.extend(answer)
        elif isinstance(operation, op.Acknowledge):
            over = [refusal.token for refusal in answer.refused]
            if not isinstance(operation, op.Heartbeat):
                over += list(answer.accepted)
            self.lets_go(over)

    def lets_go(self, tokens: list[LeaseToken]) -> None:
        self.held = [lease for lease in self.held if lease.token not in tokens]
        self.spent = (self.spent + tokens)[-30:]

    def sleep_past_expiry(self) -> None:
        last = max(lease.expires_at for lease in self.held)
        end = round(last.timestamp() * 1_000_000) + self.random.randrange(3_000_000)
        self.asleep_until = max(self.site.clock.micros, end)


@dataclass
class Operator:
    name: str
    sites: list[Site]
    random: Random
    taken: list[PendingItem] = field(default_factory=list)  # what its drains handed over, however long ago
    buried: list[PendingItem] = field(default_factory=list)  # dead letters it has copied

    def act(self, site: Site) -> op.Operation:
        random = self.random
        match random.choices(["drain", "restore", "dead", "owner", "sweep", "prune", "look"], [2, 5, 5, 1, 5, 2, 3])[0]:
            case "drain":
                return tending.Drain(site, self.name, random.choice([1, 2, 5, None]))
            case "restore":
                return self._restore(site)
            case "dead":
                return self._dead(site)
            case "owner":
                return op.ReleaseOwner(site, self.name, f"worker-{random.randrange(5)}")
            case "sweep":
                return tending.Sweep(site, self.name)
            case "prune":
                before = random.choice([None, max(0, site.audit.number - random.randrange(40))])
                older = random.choice([None, 0.0, 5.0]) if before is not None else random.choice([0.0, 5.0])
                return tending.PruneEvents(site, self.name, before, older)
            case _:
                return tending.Look(site, self.name)

    def _restore(self, site: Site) -> op.Operation:
        """Something drained, here or there, from its own notes or the queue's; or a dead letter that it copied."""
        chosen = list(self.taken)
        if self.random.random() < 0.3:
            chosen += self.random.choice(self.sites).queue.drained()
        if self.random.random() < 0.1:
            chosen += self.buried
        if not chosen:
            return tending.Drain(site, self.name, 3)
        return tending.Restore(site, self.name, self.random.sample(chosen, self.random.randint(1, min(6, len(chosen)))))

    def _dead(self, site: Site) -> op.Operation:
        dead = site.queue.dead_letters()
        self.buried = (self.buried + dead[:2])[-10:]
        ids = [pending.sequence_id for pending in dead] + [self.random.randint(1, 50)]
        chosen = self.random.sample(ids, self.random.randint(1, len(ids)))
        if self.random.random() < 0.7:
            return tending.RequeueDead(site, self.name, chosen)
        return tending.PurgeDead(site, self.name, chosen)

    def hears(self, operation: op.Operation, answer: Any) -> None:
        if isinstance(operation, tending.Drain):
            self.taken = (self.taken + answer)[-30:]


@dataclass
class Reader:
    """Tails the log in bites of any size, and lets the queue know from time to time how far it has come."""

    name: str
    site: Site
    random: Random
    begun: int = 0
    cursor: int = 0
    registered: bool = False
    read: list[Any] = field(default_factory=list)

    def act(self) -> op.Operation:
        if not self.registered:
            return tending.RegisterReader(self.site, self.name, self.name, self.cursor)
        if self.cursor and self.random.random() < 0.4:
            return tending.AdvanceReader(self.site, self.name, self.name, self.cursor)
        if self.random.random() < 0.1:
            return tending.ReadEvents(self.site, self.name, self.random.randrange(self.cursor + 1), 10)
        return tending.ReadEvents(self.site, self.name, self.cursor, self.random.choice([1, 3, 50]))

    def hears(self, operation: op.Operation, answer: Any) -> None:
        if isinstance(operation, tending.RegisterReader):
            self.registered = True
        elif isinstance(operation, tending.ReadEvents) and operation.after == self.cursor:
            self.read.extend(answer)
            self.cursor += len(answer)

    def starts_over(self, operation: op.Operation, oldest: int) -> None:
        """Told that its events are gone, before it was registered: it begins with the oldest there is."""
        if isinstance(operation, tending.RegisterReader):
            self.begun = self.cursor = oldest - 1
            self.read = []
