"""Operator jobs, really run: what they do to the queue, to files, and what they leave when something goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from lease_core import LeaseQueue, PendingItem, WorkItem
from lease_core.errors import StoreUnavailable
from lease_core.model import from_json
from omnirelay_dagster import LeaseQueueResource, pending_file
from omnirelay_dagster.operator_jobs import build_operator_jobs

JOBS = {job.name: job for job in build_operator_jobs("landing")}


@pytest.fixture
def landing(tmp_path: Path) -> LeaseQueueResource:
    return LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", durability="relaxed")


@pytest.fixture
def queue(landing: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueueResource(**landing.model_dump(exclude_none=True)).get_queue() as opened:
        yield opened


def files(count: int) -> list[WorkItem]:
    return [WorkItem("file", str(number), body=b"\n\xff", attributes={"a": "ü"}) for number in range(count)]


def run(instance: dg.DagsterInstance, landing: LeaseQueueResource, duty: str, **config: Any) -> dict[str, Any]:
    """Run a job as the launchpad would, and give the metadata of its output."""
    name = f"landing_{duty}"
    result = JOBS[name].execute_in_process(
        run_config={"ops": {f"{name}_op": {"config": config}}}, resources={"landing": landing}, instance=instance
    )
    [event] = result.filter_events(lambda each: each.is_successful_output)
    return {key: value.value for key, value in event.step_output_data.metadata.items()}


def kill(queue: LeaseQueue, count: int) -> None:
    queue.fail(queue.lease("worker", count), "bad", requeue=False)


def on_disk(path: Path) -> list[PendingItem]:
    return [from_json(PendingItem, line) for line in path.read_bytes().splitlines()]


def test_names_carry_the_queue_and_fields_have_descriptions() -> None:
    assert set(JOBS) == {
        "landing_requeue_dead_letters",
        "landing_drain_to_file",
        "landing_restore_from_file",
        "landing_release_owner",
    }
    for job in JOBS.values():
        [node] = job.all_node_defs
        fields = node.config_field.config_type.fields  # type: ignore[union-attr]
        assert all(field.description for field in fields.values())


def test_all_dead_letters_are_requeued(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omnirelay_dagster.operator_jobs._AT_ONCE", 2)
    queue.enqueue(files(5))
    kill(queue, 5)
    assert run(instance, landing, "requeue_dead_letters") == {"requeued": 5, "passed_over": 0, "still_dead": 0}
    assert queue.stats().pending == 5


def test_some_dead_letters_are_requeued(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    receipts = queue.enqueue(files(5))
    kill(queue, 4)
    ids = [receipts[1].sequence_id, receipts[4].sequence_id]
    found = run(instance, landing, "requeue_dead_letters", ids=ids)
    assert found == {"requeued": 1, "passed_over": 1, "still_dead": 3}
    assert run(instance, landing, "requeue_dead_letters", limit=2)["still_dead"] == 1


def test_the_log_says_who_requeued(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    queue.enqueue(files(1))
    kill(queue, 1)
    run(instance, landing, "requeue_dead_letters")
    principal = queue.events()[-1].principal
    assert principal is not None
    assert principal.startswith("dagster/")
    assert principal.endswith("/landing_requeue_dead_letters")


def test_drain_and_restore_bring_everything_back_as_it_was(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    queue.enqueue(files(7))
    held = queue.lease("worker", 2)
    found = run(instance, landing, "drain_to_file", path=str(path))
    assert (found["drained"], found["drained_earlier"], found["depth"]) == (5, 0, 0)
    assert found["bytes"] == path.stat().st_size
    assert on_disk(path) == queue.drained()
    assert list(tmp_path.glob(".*partial")) == []

    found = run(instance, landing, "restore_from_file", path=str(path))
    assert (found["restored"], found["already_there"], found["depth"]) == (5, 0, 5)
    found = run(instance, landing, "restore_from_file", path=str(path))
    assert (found["restored"], found["already_there"], found["depth"]) == (0, 5, 5)
    queue.complete(held)
    assert [lease.item for lease in queue.lease("worker", 9)] == files(7)[2:]


def test_drain_takes_no_more_than_asked(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, tmp_path: Path
) -> None:
    queue.enqueue(files(5))
    found = run(instance, landing, "drain_to_file", path=str(tmp_path / "out"), limit=3)
    assert (found["drained"], found["depth"]) == (3, 2)


def test_many_steps_are_one_file(queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_file, "_AT_ONCE", 3)
    queue.enqueue(files(10))
    assert pending_file.drain_to_file(queue, tmp_path / "out", None) == (10, 0)
    assert len(on_disk(tmp_path / "out")) == 10
    assert pending_file.restore_from_file(queue, tmp_path / "out") == (10, 0)
    assert pending_file.drain_to_file(queue, tmp_path / "six", 6) == (6, 0)


@pytest.mark.parametrize("where", ["there", "nowhere/out"])
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_taken(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, tmp_path: Path, where: str
) -> None:
    (tmp_path / "there").write_text("mine")
    queue.enqueue(files(2))
    before = queue.stats().head
    with pytest.raises(dg.Failure, match="give another path"):
        run(instance, landing, "drain_to_file", path=str(tmp_path / where))
    assert queue.stats().head == before
    assert (tmp_path / "there").read_text() == "mine"


def test_a_failed_drain_puts_everything_back(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending_file, "_AT_ONCE", 2)
    queue.enqueue(files(7))
    real, calls = os.fsync, iter(range(100))

    def full_on_the_third(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_on_the_third)
    with pytest.raises(OSError, match="No space") as caught:
        pending_file.drain_to_file(queue, tmp_path / "out", None)
    assert caught.value.__notes__ == ["the 6 items that had been taken are back in the queue"]
    assert queue.stats().pending == 7
    assert queue.drained() == []
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


def test_a_drain_that_was_interrupted_puts_everything_back(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.enqueue(files(3))

    def interrupted(partial: Path, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pending_file, "_appear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pending_file.drain_to_file(queue, tmp_path / "out", None)
    assert queue.stats().pending == 3


KILLED = """
import os, signal, sys
from pathlib import Path
from lease_core import LeaseQueue
from omnirelay_dagster import pending_file

pending_file._appear = lambda partial, path: os.kill(os.getpid(), signal.SIGKILL)
pending_file.drain_to_file(LeaseQueue.open(sys.argv[1], "landing"), Path(sys.argv[2]), 3)
"""


def test_what_a_killed_drain_took_is_written_by_the_next(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    queue.enqueue(files(5))
    killed = subprocess.run([sys.executable, "-c", KILLED, landing.url, str(path)], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert queue.stats().pending == 2
    found = run(instance, landing, "drain_to_file", path=str(path), include_drained=True)
    assert (found["drained"], found["drained_earlier"]) == (2, 3)
    assert sorted(each.item.resource_id for each in on_disk(path)) == ["0", "1", "2", "3", "4"]


def test_if_nothing_can_be_put_back_the_error_says_where_the_items_are(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.enqueue(files(3))

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the database is away")

    def full(partial: Path, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(queue, "restore", away)
    monkeypatch.setattr(pending_file, "_appear", full)
    with pytest.raises(OSError, match="No space") as caught:
        pending_file.drain_to_file(queue, tmp_path / "out", None)
    assert "include_drained" in caught.value.__notes__[0]
    assert len(queue.drained()) == 3


def test_a_file_that_appeared_meanwhile_is_not_replaced(
    queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.enqueue(files(3))
    path = tmp_path / "out"
    real = LeaseQueue.drain

    def drain_while_somebody_writes(self: LeaseQueue, *arguments: Any, **named: Any) -> list[PendingItem]:
        path.write_text("mine")
        return real(self, *arguments, **named)

    monkeypatch.setattr(LeaseQueue, "drain", drain_while_somebody_writes)
    with pytest.raises(dg.Failure, match="somebody else"):
        pending_file.drain_to_file(queue, path, None)
    assert path.read_text() == "mine"
    assert queue.stats().pending == 3


def test_a_queue_that_forgets_at_once_is_not_drained_to_a_file(tmp_path: Path) -> None:
    resource = LeaseQueueResource(url=f"sqlite:///{tmp_path}/other.db", retention=0)
    with resource.get_queue() as queue:
        queue.enqueue(files(1))
        with pytest.raises(dg.Failure, match="set retention to 60 or more"):
            pending_file.drain_to_file(queue, tmp_path / "out", None)
        assert queue.stats().pending == 1


@pytest.mark.parametrize("line", [b"{", b'{"item": 1}', b"\xff", b"[]"])
def test_a_damaged_file_restores_nothing_and_names_the_line(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, tmp_path: Path, line: bytes
) -> None:
    path = tmp_path / "out"
    queue.enqueue(files(3))
    pending_file.drain_to_file(queue, path, None)
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(dg.Failure, match="line 4 is not a drained item"):
        run(instance, landing, "restore_from_file", path=str(path))
    assert queue.stats().pending == 0


def test_a_file_that_is_not_there_is_said_to_be_missing(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, tmp_path: Path
) -> None:
    with pytest.raises(dg.Failure, match="cannot be read: No such file"):
        run(instance, landing, "restore_from_file", path=str(tmp_path / "none"))


def test_an_owner_is_released_by_its_name(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    queue.enqueue(files(5))
    queue.lease("gone", 2)
    queue.lease("alive", 1)
    found = run(instance, landing, "release_owner", owner="gone")
    assert (found["released"], found["owners"], found["depth"]) == (2, ["gone"], 4)
    assert [lease.owner_peer_id for lease in queue.leases()] == ["alive"]


@pytest.mark.parametrize("owner", ["run-1", "dagster/run-1"])
def test_a_run_is_released_with_all_of_its_steps(
    instance: dg.DagsterInstance, landing: LeaseQueueResource, queue: LeaseQueue, owner: str
) -> None:
    queue.enqueue(files(5))
    for name in ("dagster/run-1/bronze", "dagster/run-1/silver", "dagster/run-11/bronze"):
        queue.lease(name, 1)
    found = run(instance, landing, "release_owner", owner=owner)
    assert found["owners"] == ["dagster/run-1/bronze", "dagster/run-1/silver"]
    assert [lease.owner_peer_id for lease in queue.leases()] == ["dagster/run-11/bronze"]


def test_releasing_somebody_who_holds_nothing_releases_nothing(
    instance: dg.DagsterInstance, landing: LeaseQueueResource
) -> None:
    assert run(instance, landing, "release_owner", owner="nobody")["released"] == 0
