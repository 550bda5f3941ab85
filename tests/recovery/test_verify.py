"""Every kind of damage is found, and named by the first number that is bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent
from lease_core.recovery import rebuild, snapshot, verify
from lease_core.replication import (
    CorruptCopy,
    JsonlSink,
    ObjectStoreSink,
    Relay,
    Rules,
    SqlSink,
    read_jsonl,
    read_segments,
    read_sql,
    with_shard,
)
from tests.conformance.clock import FakeClock
from tests.recovery.histories import config, events, live


class Listed:
    """Events as a source, whatever they are."""

    namespace = "main"

    def __init__(self, told: list[LeaseEvent]) -> None:
        self._told = told

    def events(self, after: int, limit: int) -> list[LeaseEvent]:
        at = 0 if after == 0 else next(i for i, e in enumerate(self._told) if e.sequence_number == after) + 1
        return self._told[at : at + limit]


def test_a_good_copy_is_good(original: LeaseQueue, tmp_path: Path) -> None:
    Relay(original, JsonlSink(tmp_path / "lines")).run_once()
    report = verify(read_jsonl(tmp_path / "lines"), original, tables=original)
    assert report.ok
    assert (report.last_good, report.first_bad) == (original.stats().head, None)


Damage = Callable[[list[LeaseEvent]], list[LeaseEvent]]


@pytest.mark.parametrize(
    ("damage", "first_bad"),
    [
        pytest.param(lambda told: told[:40] + told[41:], 41, id="an event is missing"),
        pytest.param(lambda told: [*told[:40], told[41], told[40], *told[42:]], 41, id="two are swapped"),
        pytest.param(lambda told: [*told[:41], told[40], *told[41:]], 42, id="one is there twice"),
        pytest.param(lambda told: _changed(told, 40, pending=10_000), 41, id="the depth is wrong"),
        pytest.param(lambda told: _changed(told, 40, peer_id="somebody else"), 41, id="somebody else did it"),
        pytest.param(lambda told: told[:40], 41, id="it ends too early"),
    ],
)
def test_divergence_is_named_by_its_number(damage: Damage, first_bad: int, original: LeaseQueue) -> None:
    report = verify(Listed(damage(events(original))), original, tables=original)
    assert (report.ok, report.first_bad, report.last_good) == (False, first_bad, first_bad - 1)


def _changed(told: list[LeaseEvent], at: int, **fields: Any) -> list[LeaseEvent]:
    return [*told[:at], msgspec.structs.replace(told[at], **fields), *told[at + 1 :]]


def test_a_shard_is_no_difference_and_hides_none(original: LeaseQueue, tmp_path: Path) -> None:
    Relay(original, with_shard(JsonlSink(tmp_path / "lines"), "eu-1")).run_once()
    copy = read_jsonl(tmp_path / "lines")
    assert verify(copy, original, tables=original).ok
    assert verify(original, copy).ok
    assert verify(Listed(_changed(events(copy), 40, peer_id="x")), original).problem == "the two differ: peer_id"


@pytest.fixture
def small(clock: FakeClock, tmp_path: Path) -> LeaseQueue:
    queue = LeaseQueue.open("sqlite://", "main", config(), clock=clock)
    queue.enqueue([WorkItem("file", name, body=b"x") for name in "ab"])
    queue.complete(queue.lease("worker", limit=1), result={"rows": 1})
    return queue


@pytest.mark.parametrize("kind", ["segments", "lines"])
def test_a_flipped_bit_anywhere_is_found_and_never_used(kind: str, small: LeaseQueue, tmp_path: Path) -> None:
    folder, copy = _copied(kind, small, tmp_path)
    [file] = [path for path in folder.rglob("*.jsonl") if path.is_file()]
    whole = file.read_bytes()
    good = events(small)
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        report = verify(copy())
        assert not report.ok, f"byte {at} of {len(whole)}"
        assert report.last_good < len(good)
        if at % 50 == 0:
            with pytest.raises(CorruptCopy):
                rebuild(copy(), "sqlite://", namespace="main")


@pytest.mark.parametrize("kind", ["segments", "lines"])
def test_damage_in_the_middle_is_named_by_the_batch_it_is_in(
    kind: str, original: LeaseQueue, tmp_path: Path, clock: FakeClock
) -> None:
    """Not by the page of the reader, which is larger: all before that batch is good, and can be recovered."""
    folder, copy = _copied(kind, original, tmp_path, size=7)
    [file] = [path for path in folder.rglob("*.jsonl") if b'"sequenceNumber":31,' in path.read_bytes()]
    file.write_bytes(file.read_bytes().replace(b'"sequenceNumber":31,', b'"sequenceNumber":13,'))
    report = verify(copy())
    assert (report.last_good, report.first_bad) == (28, 29)
    place = f"sqlite:///{tmp_path}/rebuilt.db"
    with pytest.raises(CorruptCopy) as found:
        rebuild(copy(), place, namespace="main", config=config(), clock=clock)
    assert found.value.first_bad == 29
    with rebuild(copy(), place, namespace="main", upto=28, config=config(), clock=clock) as queue:
        assert events(queue) == events(original)[:28]


def test_damage_in_a_table_is_named_by_its_row(original: LeaseQueue, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/table.db"
    Relay(original, SqlSink(url)).run_once()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE omnirelay_copied_event SET event = event || ' ' WHERE sequence_number = 31"))
    engine.dispose()
    assert verify(read_sql(url, "main")).first_bad == 31


@pytest.mark.parametrize("kind", ["segments", "lines"])
def test_a_truncated_copy_gives_its_good_part_or_nothing(kind: str, small: LeaseQueue, tmp_path: Path) -> None:
    folder, copy = _copied(kind, small, tmp_path, size=2)
    good = events(small)
    for file in sorted(path for path in folder.rglob("*.jsonl") if path.is_file()):
        whole = file.read_bytes()
        for length in range(len(whole)):
            file.write_bytes(whole[:length])
            report = verify(copy(), small)
            assert not report.ok, f"{length} of {len(whole)} bytes of {file.name}"
            assert report.last_good < len(good)
            if length % 50 == 0:
                with rebuild(copy(), "sqlite://", namespace="main", upto=report.last_good) as queue:
                    assert events(queue) == good[: report.last_good]
        file.write_bytes(whole)


@pytest.mark.parametrize("kind", ["segments", "lines"])
@pytest.mark.parametrize("other", ["the queue", "another copy"])
def test_a_copy_that_ends_before_the_other_is_named_by_the_first_event_it_lacks(
    kind: str, other: str, original: LeaseQueue, tmp_path: Path
) -> None:
    """Cut off between two batches it is whole in itself: only the other knows."""
    against = original if other == "the queue" else Listed(events(original))
    head, copy = original.stats().head, _cut_after(35, kind, original, tmp_path)
    assert verify(copy).ok
    report = verify(copy, against)
    assert (report.ok, report.last_good, report.first_bad, report.behind) == (False, 35, 36, head - 35)
    assert str(report) == f"event 36: the copy ends at 35, and the other has events up to {head} (good up to 35)"


def test_a_copy_may_be_behind_as_far_as_that_is_allowed(original: LeaseQueue, tmp_path: Path) -> None:
    head, copy = original.stats().head, _cut_after(35, "lines", original, tmp_path)
    report = verify(copy, original, lag_allowed=head - 35)
    assert report.ok
    assert (report.last_good, report.first_bad, report.behind) == (35, None, head - 35)
    assert str(report) == f"good up to event 35; the other has events up to {head}, {head - 35} more"
    assert not verify(copy, original, lag_allowed=head - 36).ok
    with pytest.raises(InvalidInput, match="lag_allowed"):
        verify(copy, original, lag_allowed=-1)


def test_tables_are_not_said_to_be_good_by_a_copy_that_may_be_behind(original: LeaseQueue, tmp_path: Path) -> None:
    copy = _cut_after(35, "lines", original, tmp_path)
    assert verify(copy, original, tables=original, lag_allowed=10**6).first_bad == 36


def _cut_after(number: int, kind: str, queue: LeaseQueue, tmp_path: Path) -> Any:
    """A copy of the log in batches of seven, without what comes after the one that ends with ``number``."""
    folder, copy = _copied(kind, queue, tmp_path, size=7)
    files = sorted(path for path in folder.rglob("*.jsonl") if path.is_file())
    if kind == "segments":
        for file in files[number // 7 :]:
            file.unlink()
    else:
        [file] = files
        lines = file.read_bytes().splitlines(keepends=True)
        seals = [at for at, line in enumerate(lines) if line.startswith(b'{"seal"')]
        file.write_bytes(b"".join(lines[: seals[number // 7 - 1] + 1]))
    return copy()


def _copied(kind: str, queue: LeaseQueue, tmp_path: Path, size: int = 1_000) -> tuple[Path, Callable[[], Any]]:
    folder = tmp_path / kind
    folder.mkdir()
    sink: Any = JsonlSink(folder) if kind == "lines" else ObjectStoreSink(f"file://{folder}")
    Relay(queue, sink, rules=Rules(batch_size=size, linger=0)).run_once()
    return folder, lambda: read_jsonl(folder, "main") if kind == "lines" else read_segments(f"file://{folder}", "main")


TAMPER = {
    "a state": "UPDATE omnirelay_span SET state = 4 WHERE state = 1",
    "an item": "UPDATE omnirelay_item SET resource_id = 'other' WHERE id = (SELECT min(id) FROM omnirelay_item)",
    "an attempt": "UPDATE omnirelay_span SET attempt = 9 WHERE first = (SELECT min(first) FROM omnirelay_span)",
    "a result": "UPDATE omnirelay_span SET result = CAST('[]' AS BLOB) WHERE state = 3 AND result IS NOT NULL",
    "a lease": "UPDATE omnirelay_span SET expires_at = expires_at + 1 WHERE state = 2",
    "a token": "UPDATE omnirelay_span SET fence = fence + 1 WHERE state = 2",
    "how a lease ended": "UPDATE omnirelay_span SET ended = 3 WHERE ended = 1",
    "an owner": "UPDATE omnirelay_span SET owner = 'somebody else' WHERE state = 2",
    "when it is its turn": "UPDATE omnirelay_span SET available_at = available_at + 1 WHERE state = 1",
    "when it finished": "UPDATE omnirelay_span SET available_at = available_at - 1 WHERE state = 4",
    "a priority": "UPDATE omnirelay_span SET priority = 9 WHERE state = 1",
    "when it came in": "UPDATE omnirelay_item SET enqueued_at = 1 WHERE id = (SELECT max(id) FROM omnirelay_item)",
    "no errors": "DELETE FROM omnirelay_error",
    "one error less": "DELETE FROM omnirelay_error WHERE number = (SELECT min(number) FROM omnirelay_error)",
    "an error's text": "UPDATE omnirelay_error SET error = 'fine'",
    "an error's attempt": "UPDATE omnirelay_error SET attempt = attempt + 1",
    "an error's time": "UPDATE omnirelay_error SET at = at + 1",
    "whose error it was": "UPDATE omnirelay_error SET peer = 'somebody else'",
    "that there are errors": "UPDATE omnirelay_span SET has_errors = 0 WHERE has_errors = 1",
    "a key": "UPDATE omnirelay_span SET key = 'k' WHERE state = 1",
    "an item that nobody would lease": "UPDATE omnirelay_span SET ready = 0 WHERE state = 1",
    "an item without a state": "DELETE FROM omnirelay_span WHERE state = 3",
    "a state without an item": "DELETE FROM omnirelay_item "
    "WHERE id IN (SELECT first FROM omnirelay_span WHERE state = 3)",
    "an item that never came in": "INSERT INTO omnirelay_item (ns, id, enqueued_at, resource_type, resource_id) "
    "SELECT ns, 777777, enqueued_at, resource_type, resource_id FROM omnirelay_item LIMIT 1",
    "a state of no item": "INSERT INTO omnirelay_span (ns, first, last, state, ready, priority, available_at, attempt, "
    "fence, has_errors) SELECT ns, 777777, 777778, 1, 1, 0, 0, 0, 0, 0 FROM omnirelay_span LIMIT 1",
    "a state of more items": "UPDATE omnirelay_span SET last = last + 1 "
    "WHERE first = (SELECT max(first) FROM omnirelay_span)",
    "errors of no item": "INSERT INTO omnirelay_error (ns, last, number, nth, first, attempt, at, error) "
    "SELECT ns, 777777, 1, 0, 777777, 1, 1, 'x' FROM omnirelay_item LIMIT 1",
    "a count of pending": "UPDATE omnirelay_head SET pending = pending + 1",
    "a count of active": "UPDATE omnirelay_head SET active = 0",
    "a count of dead": "UPDATE omnirelay_head SET dead = dead + 7",
    "a count of completed": "UPDATE omnirelay_head SET completed = 0",
    "the next id": "UPDATE omnirelay_head SET next_id = 1",
    "backpressure": "UPDATE omnirelay_head SET backpressure = 1",
    "when a delayed item is looked for": "UPDATE omnirelay_head SET next_due = NULL",
    "when an ended lease is looked for": "UPDATE omnirelay_head SET next_expiry = next_expiry + 1000000000000",
}


@pytest.mark.parametrize("what", TAMPER)
def test_tables_that_are_not_what_the_log_says_are_found(what: str, original: LeaseQueue) -> None:
    _live_a_little(original)
    assert verify(original, tables=original).ok
    with original._store.engine.connect() as connection:
        assert connection.execute(sa.text(TAMPER[what])).rowcount
    report = verify(original, tables=original)
    assert not report.ok
    assert report.first_bad == original.stats().head


def _live_a_little(queue: LeaseQueue) -> None:
    """Let there be an item in every state, some with errors, and one whose time has not come."""
    queue.drain()
    queue.enqueue([WorkItem("file", name) for name in "abcdefg"])
    held = queue.lease("worker", limit=5)
    queue.complete(held[0])
    queue.fail(held[1], "hopeless", requeue=False)
    queue.fail(held[2], "not now", delay=1_000)
    queue.fail(held[3], "at once", delay=0)
    [again] = [
        lease for lease in queue.lease("another", limit=5) if lease.token.sequence_id == held[3].token.sequence_id
    ]
    queue.fail(again, "at once, again", delay=0)


def test_a_queue_that_has_nothing_in_its_log_has_nothing_in_its_tables(clock: FakeClock) -> None:
    with LeaseQueue.open("sqlite://", "main", clock=clock) as queue:
        assert verify(queue, tables=queue).ok
        with queue._store.engine.connect() as connection:
            connection.execute(sa.text(TAMPER["the next id"].replace("= 1", "= 2")))
        assert verify(queue, tables=queue).problem == "the queue's head says next id 2; its log says 1"


@pytest.mark.parametrize("exclusive", ["resource", "partition"])
def test_an_item_that_waits_for_its_key_though_nobody_has_it_is_found(exclusive: str, clock: FakeClock) -> None:
    with LeaseQueue.open("sqlite://", "main", config(exclusive), clock=clock) as queue:
        queue.enqueue([WorkItem("file", "a", partition_key="p") for _ in range(3)])
        assert verify(queue, tables=queue).ok
        with queue._store.engine.connect() as connection:
            connection.execute(sa.text("UPDATE omnirelay_span SET ready = 0"))
        assert "item 1: would never be leased" in str(verify(queue, tables=queue))


@pytest.mark.parametrize("exclusive", [None, "resource", "partition"])
@pytest.mark.parametrize("retention", [5, 600])
@pytest.mark.parametrize("seed", range(5))
def test_tables_are_good_whatever_happened_to_the_queue(
    seed: int, retention: int, exclusive: str | None, clock: FakeClock
) -> None:
    """What was forgotten after its retention is not missed, in the queue or in what is made of its log."""
    rules = config(exclusive, retention=retention)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as queue:
        live(queue, clock, seed)
        assert verify(queue, tables=queue).ok
        with rebuild(queue, "sqlite://", config=rules, clock=clock, leases="release") as copy:
            assert verify(copy, tables=copy).ok
            live(copy, clock, seed + 100)
            assert verify(copy, tables=copy).ok


def test_a_pruned_log_is_verified_from_where_it_begins(original: LeaseQueue) -> None:
    oldest = original.prune_events(before=100)
    assert verify(original, after=oldest).last_good == original.stats().head


def test_tables_are_not_said_to_be_good_without_a_look_at_them(original: LeaseQueue, tmp_path: Path) -> None:
    oldest = original.prune_events(before=100)
    with pytest.raises(InvalidInput, match="tables: cannot be compared with after=: give snapshot="):
        verify(original, tables=original, after=oldest)
    with pytest.raises(InvalidInput, match=rf"begins with event {oldest + 1}, .* Give a snapshot, .* --snapshot FILE"):
        verify(original, tables=original)
    snapshot(original, tmp_path / "file")
    with pytest.raises(InvalidInput, match="after: is what the snapshot says"):
        verify(original, after=oldest, snapshot=tmp_path / "file")


@pytest.mark.parametrize("exclusive", [None, "resource", "partition"])
@pytest.mark.parametrize("seed", range(5))
def test_a_queue_made_from_a_snapshot_is_verified_from_there_on(
    seed: int, exclusive: str | None, tmp_path: Path, clock: FakeClock
) -> None:
    rules = config(exclusive)
    with LeaseQueue.open("sqlite://", "main", rules, clock=clock) as queue:
        live(queue, clock, seed)
        made = snapshot(queue, tmp_path / "file")
        queue.prune_events(before=made.sequence_number + 1)
        assert verify(queue, tables=queue, snapshot=tmp_path / "file").last_good == made.sequence_number
        live(queue, clock, seed + 100)
        assert verify(queue, tables=queue, snapshot=tmp_path / "file").ok
        with rebuild(queue, "sqlite://", config=rules, clock=clock, snapshot=tmp_path / "file") as copy:
            live(copy, clock, seed + 200)
            report = verify(copy, tables=copy, snapshot=tmp_path / "file")
            assert (report.ok, report.last_good) == (True, copy.stats().head)
            snapshot(copy, tmp_path / "newer")
            with pytest.raises(InvalidInput, match="snapshot: is as of event"):
                verify(copy, tables=queue, snapshot=tmp_path / "newer")


@pytest.mark.parametrize("what", TAMPER)
@pytest.mark.parametrize("later", [False, True])
def test_tables_that_are_not_what_snapshot_and_log_say_are_found(
    what: str, later: bool, original: LeaseQueue, tmp_path: Path
) -> None:
    _live_a_little(original)
    made = snapshot(original, tmp_path / "file")
    if later:
        original.enqueue(WorkItem("file", "later"))
    original.prune_events(before=made.sequence_number + 1)
    assert verify(original, tables=original, snapshot=tmp_path / "file").ok
    with original._store.engine.connect() as connection:
        assert connection.execute(sa.text(TAMPER[what])).rowcount
    assert not verify(original, tables=original, snapshot=tmp_path / "file").ok


def test_a_damaged_snapshot_verifies_nothing(original: LeaseQueue, tmp_path: Path) -> None:
    snapshot(original, tmp_path / "file")
    whole = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(whole.replace(b"worker-1", b"worker-2", 1))
    with pytest.raises(CorruptCopy, match="checksum"):
        verify(original, tables=original, snapshot=tmp_path / "file")


def test_what_a_copy_has_beyond_the_tables_is_verified_too(original: LeaseQueue) -> None:
    told = events(original)
    doubled = [*told, msgspec.structs.replace(told[-1], sequence_number=len(told) + 1, pending=4_711)]
    assert verify(Listed(doubled), tables=original).first_bad == len(told) + 1
