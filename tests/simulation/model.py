"""What a queue should be: one dictionary of items, and for each command the obvious loop over them.

Written from the documentation, on purpose without any of the queue's own machinery: no spans, no SQL, no state
machine. Commands return what the queue should return, or raise what it should raise, and leave in ``told`` what
the log should say. What cannot be foretold (lease ids, the jitter of a retry, the wording of an expiry) is taken
from what the log did say, ``heard``, and checked for sense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lease_core.errors import BackpressureActive, InvalidInput, QueueFull
from lease_core.model import LeaseEvent, LeaseToken, PendingItem, Receipt, WorkItem, to_datetime, to_micros

STALE = "resourcelease.stale_token"
EXPIRED = "resourcelease.lease_expired"
UNKNOWN = "resourcelease.unknown_item"
BATCH = "resourcelease.batch_refused"

SECOND = 1_000_000


class Violation(AssertionError):
    """The queue did what it must not do."""


@dataclass
class Item:
    id: int
    work: WorkItem
    enqueued_at: int
    available_at: int
    state: str = "pending"
    attempt: int = 0
    token: LeaseToken | None = None  # of the current lease or the last one
    owner: str | None = None
    expires_at: int | None = None
    ended: str | None = None  # how the last lease ended: failed, released or expired
    result: Any = None
    key: str | None = None
    offered: bool = False  # whether this is the one item of its key that may be leased
    finished_at: int = 0
    errors: list[tuple[int, str, str | None]] = field(default_factory=list)  # attempt, text, peer
    origin: tuple[str | None, int] | None = None  # the queue and the id it was restored from

    def wait(self, since: int, ended: str | None = None) -> None:
        self.state, self.available_at, self.expires_at = "pending", since, None
        self.ended = ended or self.ended

    def finish(self, state: str, now: int) -> None:
        self.state, self.finished_at, self.expires_at = state, now, None
        self.key, self.offered = None, False


@dataclass
class Rules:
    """What the model needs to know of a QueueConfig, in microseconds."""

    exclusive: str | None = None
    max_attempts: int = 5
    retry_delay: int = SECOND
    retry_delay_cap: int = 300 * SECOND
    high: int | None = None
    low: int | None = None
    capacity: int | None = None
    retention: int = 86_400 * SECOND
    in_bites: bool = False  # whether what is done in limited steps needs more than one of them


class Heard:
    """What the log said about one call."""

    def __init__(self, events: Sequence[LeaseEvent]) -> None:
        self.events = events
        self._by_item = {(event.type, event.sequence_id): event for event in events}

    def anything(self, kind: str, sequence_id: int | None = None) -> bool:
        return any(event.type == kind and sequence_id in (None, event.sequence_id) for event in self.events)

    def about(self, kind: str, sequence_id: int) -> LeaseEvent:
        event = self._by_item.get((kind, sequence_id))
        if event is None:
            raise Violation(f"the log does not say {kind} about item {sequence_id}, though it must have happened")
        return event


class Model:
    def __init__(self, queue_id: str, rules: Rules) -> None:
        self.queue_id = queue_id
        self.rules = rules
        self.items: dict[int, Item] = {}
        self.next_id = 1
        self.completed = 0
        self.backpressure = False
        self.now = 0
        self.died = False
        self.latest = 0  # the highest time the queue has ever seen
        self.heard = Heard(())
        self.told: list[dict[str, Any]] = []

    def begin(self, now: int, heard: Sequence[LeaseEvent], died: bool = False) -> None:
        """A call was made. ``died``: its caller did not live to see the end, which may have come between two steps."""
        self.now, self.heard, self.told, self.died = now, Heard(heard), [], died
        self.latest = max(self.latest, now)

    def end(self) -> None:
        self._offer_the_first_of_each_free_key()
        self._decide_backpressure()

    # Counting

    def count(self) -> Counter[str]:
        return Counter(item.state for item in self.items.values())

    def in_state(self, *states: str) -> list[Item]:
        return [item for item in self.items.values() if item.state in states]

    def can_be_leased(self, item: Item) -> bool:
        return self._is_next(item) and item.available_at <= self.now

    def may_be_leased(self, item: Item) -> bool:
        """After the clock has stepped back: what was ready once may be leased, although its time is to come again."""
        return self._is_next(item) and item.available_at <= self.latest

    def _is_next(self, item: Item) -> bool:
        return item.state == "pending" and (item.key is None or item.offered)

    # Coming in

    def enqueue(self, works: Sequence[WorkItem], peer: str | None) -> list[Receipt]:
        known = {item.work.request_id: item.id for item in self.items.values() if item.work.request_id}
        receipts: list[Receipt] = []
        fresh: list[Item] = []
        for work in works:
            if work.request_id in known:
                receipts.append(Receipt(known[work.request_id], True))
                continue
            item = self._new_item(self.next_id + len(fresh), work, self.now)
            fresh.append(item)
            if work.request_id:
                known[work.request_id] = item.id
            receipts.append(Receipt(item.id))
        if fresh:
            self._check_room(len(fresh))
        for item in fresh:
            self._take_in(item)
            later = to_datetime(item.available_at) if item.available_at != self.now else None
            self._tell("Enqueued", item, item=item.work, peer_id=peer, available_at=later)
        return receipts

    def _check_room(self, count: int) -> None:
        pending = self.count()["pending"]
        capacity = self.rules.capacity
        if capacity is not None and count > capacity:
            raise InvalidInput("items", "more than the capacity")
        if self.backpressure:
            raise BackpressureActive
        if capacity is not None and pending + count > capacity:
            raise QueueFull

    def restore(self, given: Sequence[PendingItem]) -> list[Receipt]:
        return [self._restore_one(pending) for pending in given]

    def _restore_one(self, pending: PendingItem) -> Receipt:
        origin = (pending.queue_id, pending.sequence_id)
        if (item := self._the_very_item(pending)) is not None:
            return self._put_back(item, pending)
        if (item := self._find(lambda here: here.origin == origin)) is not None:
            return Receipt(item.id, True)
        request = pending.item.request_id
        if request and (item := self._find(lambda here: here.work.request_id == request)) is not None:
            return self._put_back(item, pending)
        return Receipt(self._restore_as_new(pending, origin).id)

    def _the_very_item(self, pending: PendingItem) -> Item | None:
        """Ids are used again once an item is forgotten, so what it is must agree as well."""
        item = self.items.get(pending.sequence_id)
        if item is None or pending.queue_id != self.queue_id or item.work != pending.item:
            return None
        return item if item.enqueued_at == to_micros(pending.enqueued_at) else None

    def _find(self, fits: Callable[[Item], bool]) -> Item | None:
        return next(filter(fits, self.items.values()), None)

    def _put_back(self, item: Item, pending: PendingItem) -> Receipt:
        if item.state != "drained":
            return Receipt(item.id, True)
        item.wait(self._available(item.work))
        item.key = self._key(item.work)
        if pending.queue_id != self.queue_id:
            self._bring_along(item, pending)
        self._tell_restored(item, pending)
        return Receipt(item.id)

    def _restore_as_new(self, pending: PendingItem, origin: tuple[str | None, int]) -> Item:
        sequence_id = self.next_id if pending.sequence_id in self.items else pending.sequence_id
        item = self._new_item(sequence_id, pending.item, to_micros(pending.enqueued_at))
        item.origin = origin
        self._take_in(item)
        self._bring_along(item, pending)
        self._tell_restored(item, pending)
        return item

    def _bring_along(self, item: Item, pending: PendingItem) -> None:
        """What happened to the item elsewhere comes with it."""
        last = pending.last_token
        item.attempt, item.owner = pending.attempt, None
        item.token = last and LeaseToken(item.id, last.attempt, last.lease_id, last.fence)
        item.ended = "released" if last and last.attempt == pending.attempt + 1 else None
        item.errors = [(record.attempt, record.error, record.peer_id) for record in pending.errors]
        if pending.dead_lettered:
            item.finish("dead", self.now)

    def _tell_restored(self, item: Item, pending: PendingItem) -> None:
        waits = item.state == "pending"
        self._tell("Restored", item, item=item.work, error=pending.last_error, requeued=waits)

    def _new_item(self, sequence_id: int, work: WorkItem, enqueued_at: int) -> Item:
        return Item(sequence_id, work, enqueued_at, self._available(work), key=self._key(work))

    def _take_in(self, item: Item) -> None:
        self.items[item.id] = item
        self.next_id = max(self.next_id, item.id + 1)

    def _available(self, work: WorkItem) -> int:
        return self.now if work.not_before is None else max(self.now, to_micros(work.not_before))

    def _key(self, work: WorkItem) -> str | None:
        if self.rules.exclusive == "resource":
            return repr((work.resource_type, work.resource_id))
        return work.partition_key if self.rules.exclusive == "partition" else None

    # Leasing

    def lease(self, peer: str, limit: int, duration: int) -> list[Item]:
        """End what has run out and grant what is ready. If that only made room under some keys, look once more."""
        looked_before = False
        while True:
            expired = self.expire(partly=self.rules.in_bites)
            granted = self._first_in_line(limit)
            if looked_before and self.died and not self.heard.anything("LeaseGranted"):
                return []
            for item in granted:
                self._grant(item, peer, self.now + duration)
            self.end()
            if granted or not expired:
                self._left_nothing_undone(granted)
                return granted
            looked_before = True

    def _first_in_line(self, limit: int) -> list[Item]:
        chosen = {event.sequence_id for event in self.heard.events if event.type == "LeaseGranted"}
        may = sorted((item for item in self.items.values() if self.may_be_leased(item)), key=_turn)
        if self.rules.in_bites:  # some may not have been made ready yet; a key may have been freed a step before
            self._offer_the_first_of_each_free_key()
            return sorted((i for i in self.items.values() if i.id in chosen and self.may_be_leased(i)), key=_turn)
        return [item for item in may if item.id in chosen or self.can_be_leased(item)][:limit]

    def _left_nothing_undone(self, granted: list[Item]) -> None:
        if not granted and not self.died:
            left = [i.id for i in self.items.values() if self.can_be_leased(i) or self._has_run_out(i)]
            if left:
                raise Violation(f"nothing was leased, though items {left[:5]} could have been")

    def _grant(self, item: Item, peer: str, expires_at: int) -> None:
        event = self.heard.about("LeaseGranted", item.id)
        if event.token is None:
            raise Violation(f"the grant of item {item.id} was logged without a token")
        item.state, item.owner, item.expires_at, item.ended = "leased", peer, expires_at, None
        item.attempt += 1
        item.available_at = self.now
        item.token = LeaseToken(item.id, item.attempt, event.token.lease_id, event.sequence_number)
        self._tell("LeaseGranted", item, token=item.token, peer_id=peer, expires_at=to_datetime(expires_at), named=True)

    def expire(self, partly: bool = False) -> list[Item]:
        """End every lease that has run out, as leasing and sweeping do first; or only those that the log tells of."""
        overdue = [item for item in self.items.values() if self._has_run_out(item)]
        if partly or self.died:
            overdue = [item for item in overdue if self.heard.anything("Expired", item.id)]
        for item in overdue:
            assert item.expires_at is not None
            error = self.heard.about("Expired", item.id).error
            if not error:
                raise Violation(f"the expiry of item {item.id} was logged without a word about it")
            self._end_badly(item, "Expired", error, item.attempt < self.rules.max_attempts, item.expires_at)
        return overdue

    def _has_run_out(self, item: Item) -> bool:
        return item.state == "leased" and item.expires_at is not None and item.expires_at <= self.now

    def _end_badly(self, item: Item, kind: str, error: str, retried: bool, since: int) -> None:
        item.errors.append((item.attempt, error, item.owner))
        about: dict[str, Any] = {"token": item.token, "peer_id": item.owner, "error": error}
        if retried:
            item.wait(since, kind.lower())
            self._tell(kind, item, requeued=True, available_at=to_datetime(since), named=True, **about)
            return
        item.finish("dead", self.now)
        item.ended = kind.lower()
        self._tell(kind, item, requeued=False, named=True, **about)
        self._tell("DeadLettered", item, named=True, **about)

    # Acknowledging

    def acknowledge(
        self, verb: str, tokens: Sequence[LeaseToken], *, atomic: bool = False, **how: Any
    ) -> tuple[list[LeaseToken], list[tuple[LeaseToken, str]]]:
        """Gives the accepted tokens, and the refused ones each with the code."""
        if atomic:
            verdicts = [self._verdict(verb, token) for token in tokens]
            if any(verdict not in ("do", "repeat") for verdict in verdicts):
                codes = [BATCH if verdict in ("do", "repeat") else verdict for verdict in verdicts]
                return [], list(zip(tokens, codes, strict=True))
        refused: dict[int, str] = {}
        for position in sorted(range(len(tokens)), key=lambda at: tokens[at].sequence_id):
            verdict = self._verdict(verb, tokens[position])
            if verdict == "do":
                self._do(verb, self.items[tokens[position].sequence_id], position, how)
            elif verdict != "repeat":
                refused[position] = verdict
        accepted = [token for position, token in enumerate(tokens) if position not in refused]
        return accepted, [(tokens[position], refused[position]) for position in sorted(refused)]

    def _verdict(self, verb: str, token: LeaseToken) -> str:
        item = self.items.get(token.sequence_id)
        if item is None:
            return UNKNOWN
        if token != item.token:
            return STALE
        if item.state == "leased":
            assert item.expires_at is not None
            return "do" if item.expires_at > self.now else EXPIRED
        if (verb, item.state) == ("complete", "completed") or (verb, item.ended) in REPEATS:
            return "repeat"
        return EXPIRED if item.ended == "expired" else STALE

    def _do(self, verb: str, item: Item, position: int, how: dict[str, Any]) -> None:
        about: dict[str, Any] = {"token": item.token, "peer_id": item.owner}
        if verb == "heartbeat":
            assert item.expires_at is not None
            item.expires_at = max(item.expires_at, self.now + how["duration"])
            self._tell("Heartbeat", item, expires_at=to_datetime(item.expires_at), **about)
        elif verb == "complete":
            result = how["result"]
            item.result = result[position] if isinstance(result, list) else result
            item.finish("completed", self.now)
            self.completed += 1
            self._tell("Completed", item, result=item.result, named=True, **about)
        elif verb == "release":
            self._release(item)
        else:
            retried = how["requeue"] and item.attempt < self.rules.max_attempts
            since = self._retry_at(item, how["delay"]) if retried else self.now
            self._end_badly(item, "Failed", how["error"], retried, since)

    def _release(self, item: Item) -> None:
        about: dict[str, Any] = {"token": item.token, "peer_id": item.owner}
        item.wait(self.now, "released")
        item.attempt -= 1
        self._tell("Released", item, available_at=to_datetime(self.now), named=True, **about)

    def _retry_at(self, item: Item, delay: int | None) -> int:
        if delay is not None:
            return self.now + delay
        longest = min(self.rules.retry_delay * 2 ** (item.attempt - 1), self.rules.retry_delay_cap)
        told = self.heard.about("Failed", item.id).available_at
        pause = 0 if told is None else to_micros(told) - self.now
        if not longest * 3 // 4 <= pause <= longest:
            raise Violation(f"item {item.id} waits {pause} µs after attempt {item.attempt}, not about {longest} µs")
        return self.now + pause

    def release_owner(self, peer: str) -> int:
        held = [i for i in self.in_state("leased") if i.owner == peer and (i.expires_at or 0) > self.now]
        for item in held:
            self._release(item)
        return len(held)

    # Going out

    def drain(self, taken: Iterable[int]) -> None:
        """Take these out. Which ones a drain takes is its own choice, as long as they were pending."""
        for sequence_id in taken:
            item = self.items.get(sequence_id)
            if item is None or item.state != "pending":
                raise Violation(f"item {sequence_id} was drained, but it is {item.state if item else 'unknown'}")
            item.finish("drained", self.now)
            self._tell("Drained", item, named=True)

    def requeue_dead(self, ids: Iterable[int]) -> list[int]:
        chosen = [self.items[i] for i in sorted(set(ids)) if i in self.items and self.items[i].state == "dead"]
        for item in chosen:
            item.wait(self.now)
            item.attempt, item.token, item.owner, item.ended = 0, None, None, None
            item.key = self._key(item.work)
            self._tell("Restored", item, item=item.work, requeued=True, available_at=to_datetime(self.now))
        return [item.id for item in chosen]

    def purge_dead(self, ids: Iterable[int]) -> list[int]:
        chosen = [self.items[i] for i in sorted(set(ids)) if i in self.items and self.items[i].state == "dead"]
        for item in chosen:
            del self.items[item.id]
            self._tell("Purged", item, named=True)
        return [item.id for item in chosen]

    def forgettable(self) -> set[int]:
        """Finished items whose retention has passed."""
        bound = self.now - self.rules.retention
        return {item.id for item in self.in_state("completed", "drained") if item.finished_at < bound}

    def forget(self, ids: Iterable[int]) -> None:
        for sequence_id in ids:
            del self.items[sequence_id]

    # After every command

    def _offer_the_first_of_each_free_key(self) -> None:
        lanes: dict[str, list[Item]] = {}
        for item in self.in_state("pending", "leased"):
            if item.key is not None:
                lanes.setdefault(item.key, []).append(item)
        for lane in lanes.values():
            if not any(item.state == "leased" or item.offered for item in lane):
                min(lane, key=lambda item: item.id).offered = True

    def _decide_backpressure(self) -> None:
        rules, pending = self.rules, self.count()["pending"]
        if rules.high is None:
            active = False
        elif self.backpressure:
            active = pending > (rules.low or 0)
        else:
            active = pending >= rules.high
        if active != self.backpressure:
            self.backpressure = active
            self.told.append({"type": "BackpressureChanged", "sequence_id": None})

    def _tell(self, kind: str, item: Item, /, *, named: bool = False, **about: Any) -> None:
        event = {"type": kind, "sequence_id": item.id, **about}
        if named:
            work = item.work
            event["item"] = WorkItem(work.resource_type, work.resource_id, work.partition_key)
        self.told.append(event)


def _turn(item: Item) -> tuple[int, int, int]:
    """Highest priority first, then longest available, then in the order they came."""
    return (-item.work.priority, item.available_at, item.id)


REPEATS = {("fail", "failed"), ("release", "released")}
