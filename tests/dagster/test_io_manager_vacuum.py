"""The fenced IO manager: vacuum removes what was never published, and never anything else."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lease_core import LeaseQueue, QueueConfig, WorkItem
from lease_core.errors import LeaseRefused
from omnirelay_dagster import io_manager as module
from omnirelay_dagster.batch import LeasedBatch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from tests.dagster.publishing import orphan, output, publish, take


@pytest.mark.parametrize("where", ["local", "memory"])
def test_vacuum_removes_what_was_never_published(where: str, tmp_path: Path, landing: LeaseQueueResource) -> None:
    base = str(tmp_path / "out") if where == "local" else f"memory://vacuum-{tmp_path.name}"
    fenced = FencedIOManager(base_path=base, queue=landing)
    publish(fenced, ["kept"])
    batch = orphan(fenced)
    assert fenced.vacuum(0) == []  # its lease is still held
    batch.release_all()
    assert fenced.vacuum() == []  # not old enough
    would = fenced.vacuum(0, dry_run=True)
    assert [each.lease_id for each in would] == [batch.id]
    fs, path = fsspec.core.url_to_fs(would[0].uri)
    assert fs.find(path)
    assert fenced.vacuum(0) == would
    assert not fs.exists(path)
    assert fenced.vacuum(0) == []
    assert fenced.load("bronze") == ["kept"]


def test_vacuum_touches_nothing_that_it_cannot_prove_to_be_its_own(
    tmp_path: Path, landing: LeaseQueueResource, fenced: FencedIOManager
) -> None:
    """Other people's files, other queues' outputs in the same folder, and leases this log does not know."""
    other_queue = LeaseQueueResource(url=f"sqlite:///{tmp_path}/other.db", namespace="other")
    other = FencedIOManager(base_path=fenced.base_path, queue=other_queue)
    publish(other, ["other"])
    batch = orphan(fenced)
    batch.release_all()
    base = Path(fenced.base_path)
    strange = [
        base / "notes.txt",
        base / "bronze" / "_" / "notes.txt",
        base / "bronze" / "_" / f"{'0' * 32}-1" / "part-0.json",
        base / "bronze" / "_" / f"{batch.id}-999999" / "part-0.json",
        base / "bronze" / "_" / f"{batch.id}-{batch.leases[0].token.fence}.bak" / "part-0.json",
        base / f"{batch.id}-{batch.leases[0].token.fence}" / "part-0.json",
        tmp_path / "outside" / "_" / f"{batch.id}-{batch.leases[0].token.fence}" / "part-0.json",
    ]
    for file in strange:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    assert [removed.lease_id for removed in fenced.vacuum(0)] == [batch.id]
    assert all(file.read_text() == "mine" for file in strange)
    assert other.load("bronze") == ["other"]
    assert other.vacuum(0) == []


def test_vacuum_of_a_folder_that_is_not_there(fenced: FencedIOManager) -> None:
    assert fenced.vacuum(0) == []


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["take", "write", "publish", "fail", "expire", "vacuum"]), st.integers(0, 5)),
    max_size=40,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_vacuum_never_removes_what_is_published_or_may_still_be(actions: list[tuple[str, int]]) -> None:
    """Workers take, write, publish, fail and lose their leases in any order, while vacuum runs in between."""
    now = time.time() - 1_000_000
    with (
        tempfile.TemporaryDirectory() as base,
        LeaseQueue.open("sqlite://", "landing", QueueConfig(retry_delay=0), clock=lambda: now) as queue,
    ):
        fenced = FencedIOManager(base_path=base, queue=LeaseQueueResource(url="sqlite://"))
        fenced.queue._queue = queue
        queue.enqueue([WorkItem("file", str(n)) for n in range(12)])
        batches: list[LeasedBatch] = []
        written: dict[str, str] = {}
        for action, which in actions:
            now += 1
            batch = batches[which % len(batches)] if batches else None
            if action == "expire":
                now += 60
            elif action == "vacuum":
                fenced.vacuum(0)
            elif action == "take" and len(batches) < 20:
                batches.extend(each for each in [take(queue, 1 + which)] if each.leases)
            elif batch is not None and batch.remaining:
                act(fenced, batch, action, written)
            assert_nothing_is_missing(fenced, queue, written)
        now += 60
        queue.sweep()
        fenced.vacuum(0)
        left = {str(path.relative_to(base)) for path in Path(base).rglob("*.json")}
        assert left == {each.path for each in fenced.published("bronze")}


def act(fenced: FencedIOManager, batch: LeasedBatch, action: str, written: dict[str, str]) -> None:
    if action == "write":
        written[batch.id] = fenced._write(output(), batch, [batch.id]).path
    elif action == "fail":
        batch.fail_all("no good")
    elif action == "publish":
        try:
            written[batch.id] = fenced.publish(output(), batch, [batch.id]).path  # type: ignore[union-attr]
        except LeaseRefused:
            written.pop(batch.id, None)


def assert_nothing_is_missing(fenced: FencedIOManager, queue: LeaseQueue, written: dict[str, str]) -> None:
    published = fenced.published("bronze")
    assert fenced.load("bronze", list, allow_empty=True) == [each.lease_id for each in published]
    held = {lease.token.lease_id for lease in queue.leases()}
    assert all(Path(fenced.base_path, path).exists() for lease_id, path in written.items() if lease_id in held)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("step", ["lease_folders", "leases_held", "manifest_of"])
def test_whatever_happens_between_the_steps_of_a_vacuum_survives(
    step: str, before: bool, fenced: FencedIOManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before or after each of the three looks, one writer publishes and another one begins to write."""
    first, begun = orphan(fenced, ["first"]), []
    original = getattr(module, step)

    def meanwhile() -> None:
        monkeypatch.setattr(module, step, original)
        fenced.publish(output(), first, ["first"])
        begun.append(orphan(fenced, ["second"]))

    def disturbed(*given: Any) -> Any:
        if before:
            meanwhile()
            return original(*given)
        seen = original(*given)
        meanwhile()
        return seen

    monkeypatch.setattr(module, step, disturbed)
    assert fenced.vacuum(0) == []
    fenced.publish(output(), begun[0], ["second"])
    assert fenced.load("bronze") == ["first", "second"]
