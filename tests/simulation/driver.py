"""One history: a seed, two queues, some actors, and every call checked as it returns, raises or dies."""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import sqlalchemy as sa

from lease_core import LeaseError, LeaseToken
from lease_core.errors import EventsPruned, StoreBusy
from lease_core.replay import replay
from tests.simulation import checks, faults, tending
from tests.simulation import operations as op
from tests.simulation.actors import Operator, Producer, Reader, Worker
from tests.simulation.clock import FakeClock
from tests.simulation.meanwhile import read_while_things_change
from tests.simulation.record import HistoryFailed, Tally
from tests.simulation.scenario import draw
from tests.simulation.site import Site

MEMORY = "sqlite://"
FILE = "sqlite:///"  # a new file for each history


class History:
    def __init__(self, seed: int, url: str = MEMORY, exclusive: str | None = None) -> None:
        self.seed = seed
        self.exclusive = exclusive
        self.steps = 0
        self.random = Random(seed)
        self.echo: Callable[[str], None] | None = None
        self.scenario = draw(self.random, exclusive)
        self.clock = FakeClock()
        self.tally = Tally(histories=1)
        self.last: deque[str] = deque(maxlen=30)
        self.digest = hashlib.sha256()
        self.step = 0
        self.given_url = url
        self._open = ExitStack()

    def run(self, steps: int = 200) -> Tally:
        self.steps = steps
        with self._open, faults.seeded_ids(Random(self.seed)):
            try:
                self._set_the_stage()
                for self.step in range(1, steps + 1):
                    self._take_a_step()
                self._settle()
            except (Exception, faults.Crash) as error:
                raise HistoryFailed(self, error) from error
        self.tally.events = sum(len(site.log) for site in self.sites)
        return self.tally

    def _set_the_stage(self) -> None:
        self.url = self.given_url
        if self.url == FILE:
            directory = self._open.enter_context(tempfile.TemporaryDirectory(prefix="omnirelay-sim-"))
            self.url = f"sqlite:///{Path(directory) / 'queue.db'}"
        self.on_server = self.url.startswith("postgres")
        self.on_file = not self.on_server and self.url != MEMORY
        run = f"-{secrets.token_hex(8)}" if self.on_server else ""  # a server remembers earlier runs
        patience = {"store_timeout": 10.0} if self.on_server else {}
        bites = self.scenario.in_bites
        self._open.enter_context(faults.small_bites() if bites else nullcontext())
        self.main = Site("main", self.url, f"main{run}", self.scenario.main | patience, self.clock, bites)
        self._open.callback(self.main.close)
        self.other = Site("other", self.url, f"other{run}", self.scenario.other | patience, self.clock, bites)
        self._open.callback(self.other.close)
        self.sites = [self.main, self.other]
        self.producers = [Producer(f"producer-{i}", self.scenario, self.random) for i in range(2)]
        self.workers = [
            Worker(f"worker-{i}", self.main if i else self.random.choice(self.sites), self.scenario, self.random)
            for i in range(self.scenario.workers)
        ]
        self.operator = Operator("operator", self.sites, self.random)
        self.reader = Reader("reader", self.main, self.random)
        self.bag: list[tuple[int, op.Operation, Any]] = []  # calls that are on their way
        self.call(self.reader.act(), self.reader)

    # What happens next

    def _take_a_step(self) -> None:
        self._let_time_pass()
        random = self.random
        if self.bag and random.random() < 0.08:
            self._deliver_one()
            return
        if random.random() < 0.06:
            self._use_a_token_that_is_no_good()
            return
        if random.random() < 0.03:
            read_while_things_change(self)
            return
        operation, actor = self.next_call()
        if isinstance(operation, op.Acknowledge) and random.random() < 0.2:
            self.note(f"held back: {operation.describe()}")
            self.bag.append((self.step, operation, actor))
            if random.random() < 0.5 and isinstance(actor, Worker):
                actor.lets_go(operation.tokens)
            return
        self.call(operation, actor, self._draw_fault(operation))
        while random.random() < 0.08:
            self.fired("repeated call")
            self.call(operation, None)

    def next_call(self) -> tuple[op.Operation, Any]:
        random = self.random
        site = self.main if random.random() < 0.85 else self.other
        crowded = site.model.count()["pending"] > 40
        match random.choices(["produce", "work", "operate", "read"], [1 if crowded else 5, 9, 3, 1])[0]:
            case "produce":
                producer = random.choice(self.producers)
                return producer.act(site), producer
            case "work":
                return self._next_work()
            case "operate":
                return self.operator.act(site), self.operator
            case _:
                return self.reader.act(), self.reader

    def _next_work(self) -> tuple[op.Operation, Any]:
        awake = [worker for worker in self.workers if not worker.asleep]
        if not awake:
            self.clock.move(min(worker.asleep_until - self.clock.micros for worker in self.workers) / 1_000_000)
            awake = self.workers
        worker = self.random.choice(awake)
        if worker.asleep_until and worker.held:
            worker.asleep_until = 0
            self.fired("pause past expiry")
        elif worker.held and self.random.random() < 0.05:
            worker.sleep_past_expiry()
        return worker.act(), worker

    def _let_time_pass(self) -> None:
        random = self.random
        chance = random.random()
        if chance < 0.02:
            self.clock.move(random.uniform(1, 60))
            self.fired("clock forward")
            self.note(f"the clock jumps forward to {self.clock.micros}")
        elif chance < 0.035:
            self.clock.move(-random.choice([0.001, 1.0, 10.0, 100.0]))
            self.fired("clock backward")
            self.note(f"the clock jumps back to {self.clock.micros}")
        elif chance < 0.12:
            self._wait_for_an_edge()
        elif chance < 0.9:
            self.clock.move(random.choice([0.000001, 0.001, 0.1, 0.5, 2.0]))

    def _wait_for_an_edge(self) -> None:
        """Wait until just before, exactly at, or just after some lease, delay or retention ends."""
        edges: set[int] = set()
        for item in self.main.model.items.values():
            if item.state in ("pending", "leased"):
                edges.add(item.expires_at or item.available_at)
            elif item.state != "dead":
                edges.add(item.finished_at + self.main.model.rules.retention)
        ahead = sorted(edge for edge in edges if edge > self.clock.micros)
        if ahead:
            self.clock.micros = self.random.choice(ahead[:5]) + self.random.choice([-1, 0, 1])

    def _deliver_one(self) -> None:
        """A call that was under way arrives: late, and not always before those that were sent after it."""
        at = self.random.randrange(len(self.bag))
        _, operation, actor = self.bag.pop(at)
        self.fired("delayed call")
        if at:
            self.fired("reordered calls")
        self.call(operation, actor)

    def _use_a_token_that_is_no_good(self) -> None:
        random = self.random
        worker = random.choice(self.workers)
        kind = random.choice(["stale token", "forged token", "foreign token"])
        tokens: list[LeaseToken] = []
        if kind == "stale token":
            tokens = worker.spent
        elif kind == "foreign token":
            tokens = [lease.token for other in self.workers for lease in other.held if other.site is not worker.site]
        else:
            tokens = [self._forge(lease.token) for other in self.workers for lease in other.held]
            tokens.append(LeaseToken(random.randint(1, 100), 1, "0" * 32, 1))
        if not tokens:
            return
        self.fired(kind)
        mine = [lease.token for lease in worker.held]
        chosen = [random.choice(tokens)] + (random.sample(mine, 1) if mine and random.random() < 0.5 else [])
        make = random.choice([op.Heartbeat, op.Complete, op.Fail, op.Release])
        self.call(make(worker.site, worker.name, chosen), worker)

    def _forge(self, token: LeaseToken) -> LeaseToken:
        """A token that is nearly right."""
        match self.random.randrange(4):
            case 0:
                return LeaseToken(token.sequence_id + 1, token.attempt, token.lease_id, token.fence)
            case 1:
                return LeaseToken(token.sequence_id, token.attempt + 1, token.lease_id, token.fence)
            case 2:
                return LeaseToken(token.sequence_id, token.attempt, token.lease_id[::-1], token.fence)
            case _:
                return LeaseToken(token.sequence_id, token.attempt, token.lease_id, token.fence + 1)

    # Making a call

    def _draw_fault(self, operation: op.Operation) -> str | None:
        random = self.random
        joined = isinstance(operation, op.EnqueueInMyTransaction)
        if operation.looks:
            return None
        if random.random() < self.scenario.crash_rate:
            return f"crash: {random.choice(faults.CRASH_POINTS)}"
        if self.on_server and not joined and random.random() < 0.03:
            return random.choice(["connection lost", "commit unanswered"])
        if self.on_file and not joined and random.random() < 0.01:
            return "busy database"
        return None

    def call(self, operation: op.Operation, actor: Any, fault: str | None = None) -> None:
        """Make one call, under one fault or none, and check everything that can be checked afterwards."""
        self.tally.operations[operation.name] += 1
        site = operation.site
        line = operation.describe()
        try:
            outcome, probe = self._perform(operation, fault)
        except Exception as error:
            self.note(f"{line} -> {type(error).__name__}: {error}")
            raise
        self.note(f"{line} -> {_tell(outcome)}")
        fresh = site.read_on()
        checks.one_moment(fresh)
        site.model.begin(self.clock.micros, fresh, isinstance(outcome, faults.Crash))
        tables = checks.read_tables(site.queue)
        if isinstance(outcome, faults.Crash):
            self._resolve_crash(operation, probe, fresh, outcome, tables)
        else:
            self._judge(operation, outcome, fresh, tables)
            if actor is not None:
                self._answer(operation, actor, outcome)
        site.check_tables(tables)
        if isinstance(outcome, faults.Crash) and site.survives_restart and self.random.random() < 0.5:
            self._restart(site)

    def _perform(self, operation: op.Operation, fault: str | None) -> tuple[Any, faults.Probe]:
        queue = operation.site.queue
        with ExitStack() as around:
            probe = faults.Probe()
            if fault is not None and fault.startswith("crash: "):
                passes = self.random.choice([0, 0, 1, 2]) if operation.takes_steps else 0  # die in a later transaction
                probe = faults.Probe(fault.removeprefix("crash: "), passes=passes)
            elif fault in ("connection lost", "commit unanswered"):
                probe = self._break_the_connection(fault, around.enter_context(faults.current_wire(queue)))
            elif fault == "busy database":
                around.enter_context(faults.somebody_writing(str(sa.make_url(self.url).database)))
            around.enter_context(probe.watching(queue))
            try:
                outcome = operation.perform(queue)
            except (LeaseError, faults.Crash) as raised:
                outcome = raised
        if probe.fired or fault == "busy database":
            self.fired(fault or "")
        if fault == "busy database":
            checks.require(isinstance(outcome, StoreBusy), f"the database was busy, but the call gave {outcome!r}")
        return outcome, probe

    def _break_the_connection(self, fault: str, wire: Callable[[], Any]) -> faults.Probe:
        if fault == "commit unanswered":
            return faults.Probe("before-commit", lambda: faults.commit_and_cut(wire()))
        return faults.Probe(self.random.choice(["locked", "before-commit"]), lambda: faults.cut(wire()))

    def _judge(self, operation: op.Operation, outcome: Any, fresh: list[Any], tables: checks.Tables) -> None:
        site = operation.site
        if isinstance(outcome, StoreBusy):
            checks.require(not fresh, "a call that was refused left events in the log")
            return
        try:
            judge = operation.expect(fresh)
        except LeaseError as expected:
            checks.require(type(outcome) is type(expected), f"gave {outcome!r}; it should raise {expected!r}")
            checks.require(not fresh, "a call that was refused left events in the log")
            return
        checks.require(not isinstance(outcome, LeaseError), f"raised {outcome!r} for no reason")
        site.model.end()
        checks.events_are_as_told(site.model.told, fresh)
        judge(outcome)
        required = operation.forgets and (operation.thorough or not self.scenario.in_bites)
        site.notice_what_was_forgotten(tables, allowed=operation.forgets, required=required)

    def _resolve_crash(
        self,
        operation: op.Operation,
        probe: faults.Probe,
        fresh: list[Any],
        crash: faults.Crash,
        tables: checks.Tables,
    ) -> None:
        """The caller never learns what became of its call. The log says: all of it happened, or none of it."""
        site = operation.site
        if not probe.committed:
            checks.require(not fresh, f"the process died at {crash.point!r}, yet there are events of its call")
            return
        if fresh:
            operation.expect(fresh)
            site.model.end()
            checks.events_are_as_told(site.model.told, fresh)
        elif operation.silent:
            operation.expect(fresh)
        else:
            checks.require(operation.forgets or operation.tidies, "a call that was committed left nothing in the log")
        site.notice_what_was_forgotten(tables, allowed=operation.forgets, required=False)

    def _answer(self, operation: op.Operation, actor: Any, outcome: Any) -> None:
        if isinstance(outcome, EventsPruned) and isinstance(actor, Reader):
            actor.starts_over(operation, outcome.oldest)
        elif not isinstance(outcome, BaseException) and hasattr(actor, "hears"):
            actor.hears(operation, outcome)

    def _restart(self, site: Site) -> None:
        self.fired("restart")
        self.note(f"{site.name} is opened anew")
        site.restart()
        site.check_tables(checks.read_tables(site.queue))

    # The end

    def _settle(self) -> None:
        """All faults cease. What is under way arrives, what can be leased is completed, and everything is counted."""
        while self.bag:
            self._deliver_one()
        for site in self.sites:
            worker = Worker("finisher", site, self.scenario, self.random)
            for _ in range(500):
                self.clock.move(200)
                self.call(op.LeaseSome(site, worker.name, 100, 100.0), worker)
                if not worker.held and not site.model.in_state("pending", "leased"):
                    break
                if worker.held:
                    self.call(op.Complete(site, worker.name, [lease.token for lease in worker.held]), worker)
            left = site.model.in_state("pending", "leased")
            checks.require(not left, f"items {[item.id for item in left][:5]} cannot be leased any more")
            self.call(tending.Look(site, "onlooker"), None)
            self._log_reads_the_same_at_once(site)
            checks.own_replay_agrees(checks.read_tables(site.queue), replay(site.log))
        self._reader_has_missed_nothing()

    def _log_reads_the_same_at_once(self, site: Site) -> None:
        at_once = site.queue.events(after=site.pruned, limit=100_000)
        checks.require(at_once == site.log[site.pruned :], "the log read at once is not the log as it was tailed")

    def _reader_has_missed_nothing(self) -> None:
        reader = self.reader
        while reader.cursor < self.main.audit.number:
            self.call(tending.ReadEvents(self.main, reader.name, reader.cursor, 50), reader)
        numbers = [event.sequence_number for event in reader.read]
        expected = list(range(reader.begun + 1, self.main.audit.number + 1))
        checks.require(numbers == expected, "the tailing reader has skipped or repeated events")

    # Keeping notes

    def fired(self, fault: str) -> None:
        self.tally.faults[fault] += 1
        if fault.startswith(("crash", "busy", "conn", "commit")):
            self.note(f"fault: {fault}")

    def note(self, line: str) -> None:
        line = f"{self.step:4} t={self.clock.micros / 1e6:.6f} {line}"
        self.last.append(line)
        if self.echo is not None:
            self.echo(line)
        self.digest.update(line.encode())


def _tell(outcome: Any) -> str:
    if isinstance(outcome, faults.Crash):
        return f"died at {outcome.point!r}"
    if isinstance(outcome, BaseException):
        return f"raised {type(outcome).__name__}: {str(outcome)[:100]}"
    text = repr(outcome)
    if isinstance(outcome, list):
        ids = [getattr(getattr(each, "token", None) or each, "sequence_id", each) for each in outcome]
        text = f"{len(outcome)}: {ids}"
    return text if len(text) < 160 else text[:157] + "..."
