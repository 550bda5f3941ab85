"""Leased assets and ops in real runs: what they get, what they publish, and what becomes of the leases."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from lease_core import LeaseQueue, WorkItem
from lease_core.errors import LeaseRefused
from omnirelay_dagster.asset_decorator import leased_asset, leased_op
from omnirelay_dagster.batch import LeasedBatch, lease_batch
from omnirelay_dagster.resource import LeaseQueueResource


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def landing(tmp_path: Path) -> LeaseQueueResource:
    return LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", retry_delay=0, max_attempts=3)


@pytest.fixture
def queue(landing: LeaseQueueResource) -> Iterator[LeaseQueue]:
    with LeaseQueue.open(landing.url, landing.namespace, landing.queue_config()) as queue:
        yield queue


def files(count: int) -> list[WorkItem]:
    return [WorkItem("file", f"f{n}", body=str(n).encode()) for n in range(count)]


def run(asset: Any, landing: LeaseQueueResource, ok: bool = True, **more: Any) -> dg.ExecuteInProcessResult:
    result = dg.materialize([asset], resources={"landing": landing}, raise_on_error=False, **more)
    assert result.success is ok
    return result


def metadata(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    [event] = result.asset_materializations_for_node(name)
    return {key: value.value for key, value in event.metadata.items()}


def test_a_batch_is_completed_once_its_output_is_stored(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing", batch_size=10, group_name="bronze", tags={"layer": "bronze"}, kinds={"python"})
    def bronze(context: dg.AssetExecutionContext, batch: LeasedBatch) -> list[str]:
        """What lands."""
        assert queue.stats().active == 10
        return [item.resource_id for item in batch.items]

    queue.enqueue(files(25))
    result = run(bronze, landing)

    assert result.output_for_node("bronze") == [f"f{n}" for n in range(10)]
    assert (queue.stats().pending, queue.stats().active, queue.stats().completed) == (15, 0, 10)
    tied = metadata(result, "bronze")
    assert (tied["omnirelay/queue"], tied["omnirelay/items"], tied["omnirelay/attempt"]) == ("landing", 10, 1)
    assert tied["omnirelay/owner"] == f"dagster/{result.run_id}/bronze"
    spec = bronze.get_asset_spec()
    assert (spec.group_name, spec.description, spec.tags["layer"]) == ("bronze", "What lands.", "bronze")


def test_a_poison_item_fails_alone(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing", per_item=True)
    def each(lease: Any) -> str:
        if lease.item.resource_id == "f3":
            raise ValueError("not JSON")
        return str(lease.item.resource_id)

    queue.enqueue(files(5))
    assert run(each, landing).output_for_node("each") == ["f0", "f1", "f2", "f4"]
    assert (queue.stats().completed, queue.stats().pending) == (4, 1)
    assert queue.inspect(4)[0].errors[0].error.startswith("ValueError: not JSON")


def test_draining_goes_on_until_the_queue_is_empty(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    sizes: list[int] = []

    @leased_asset(queue="landing", batch_size=4, drain=True)
    def drained(batch: LeasedBatch) -> None:
        sizes.append(len(batch))

    queue.enqueue(files(10))
    tied = metadata(run(drained, landing), "drained")
    assert (sizes, tied["omnirelay/batches"], tied["omnirelay/items"]) == ([4, 4, 2], 3, 10)
    last = [event for event in queue.events() if event.type == "Completed"][-1].token
    assert last is not None
    assert (tied["omnirelay/lease"], tied["omnirelay/attempt"]) == (last.lease_id, 1)
    assert tied["omnirelay/fence"] == last.fence
    assert tied["omnirelay/owner"].endswith("/drained")
    assert queue.stats().completed == 10


def test_draining_item_by_item_with_a_body_that_publishes_by_itself(
    landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    seen: list[str] = []

    @leased_asset(queue="landing", batch_size=4, per_item=True, drain=True)
    def each(lease: Any) -> None:
        seen.append(lease.item.resource_id)

    queue.enqueue(files(10))
    run(each, landing)
    assert (seen, queue.stats().completed) == ([f"f{n}" for n in range(10)], 10)


def test_draining_stops_at_a_number_of_batches(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing", batch_size=2, drain=True, max_batches=2)
    def some(batch: LeasedBatch) -> None: ...

    queue.enqueue(files(10))
    run(some, landing)
    assert queue.stats().completed == 4


@pytest.mark.parametrize(("on_empty", "ok"), [("skip", True), ("wait", True), ("fail", False)])
def test_an_empty_queue(landing: LeaseQueueResource, on_empty: Any, ok: bool) -> None:
    @leased_asset(queue="landing", on_empty=on_empty, wait=0.1)
    def idle(batch: LeasedBatch) -> int:
        raise AssertionError("there is nothing to do")

    result = run(idle, landing, ok)
    assert not result.asset_materializations_for_node("idle")


def test_an_exception_fails_the_batch_with_its_error(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing")
    def broken(batch: LeasedBatch) -> None:
        raise RuntimeError("disk on fire")

    queue.enqueue(files(3))
    for _ in range(3):
        run(broken, landing, ok=False)
    dead = queue.dead_letters()
    assert [len(each.errors) for each in dead] == [3, 3, 3]
    assert dead[0].last_error is not None
    assert "RuntimeError: disk on fire" in dead[0].last_error
    assert "in broken" in dead[0].last_error


def test_a_failure_that_allows_no_retry_is_a_dead_letter_at_once(
    landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    @leased_asset(queue="landing")
    def hopeless(batch: LeasedBatch) -> None:
        raise dg.Failure("schema is wrong", allow_retries=False)

    queue.enqueue(files(2))
    run(hopeless, landing, ok=False)
    assert queue.stats().dead == 2


def test_dagster_s_own_retry_gets_the_work_again(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    attempts: list[int] = []

    @leased_asset(queue="landing", retry_policy=dg.RetryPolicy(max_retries=2))
    def flaky(batch: LeasedBatch) -> int:
        attempts.append(batch.leases[0].token.attempt)
        if len(attempts) < 3:
            raise RuntimeError("try again")
        return len(batch)

    queue.enqueue(files(2))
    assert run(flaky, landing).output_for_node("flaky") == 2
    assert attempts == [1, 2, 3]
    assert queue.stats().completed == 2


def test_items_of_a_batch_can_be_failed_and_released(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing")
    def picky(batch: LeasedBatch) -> int:
        batch.fail(batch.leases[0], "bad")
        batch.release(batch.leases[1])
        return len(batch.remaining)

    queue.enqueue(files(5))
    assert run(picky, landing).output_for_node("picky") == 3
    assert (queue.stats().completed, queue.stats().pending) == (3, 2)
    assert [status.attempt for status in queue.inspect([1, 2])] == [1, 0]


def test_what_a_body_returns_for_itself_is_kept(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing", batch_size=1)
    def told(batch: LeasedBatch) -> Any:
        return dg.MaterializeResult(metadata={"rows": 7}, data_version=dg.DataVersion("v7"))

    @leased_asset(queue="landing", batch_size=1)
    def wrapped(batch: LeasedBatch) -> Any:
        return dg.Output("x", metadata={"rows": 8})

    queue.enqueue(files(2))
    assert metadata(run(told, landing), "told")["rows"] == 7
    result = run(wrapped, landing)
    assert (metadata(result, "wrapped")["rows"], result.output_for_node("wrapped")) == (8, "x")
    assert queue.stats().completed == 2


class Doubler(dg.ConfigurableResource):  # type: ignore[type-arg]
    factor: int = 2


def test_inputs_partitions_and_typed_resources_work_as_in_any_asset(
    landing: LeaseQueueResource, queue: LeaseQueue
) -> None:
    days = dg.StaticPartitionsDefinition(["mon", "tue"])

    @dg.asset(partitions_def=days)
    def upstream() -> int:
        return 20

    @leased_asset(queue="landing", partitions_def=days, batch_size=2)
    def downstream(context: dg.AssetExecutionContext, upstream: int, batch: LeasedBatch, doubler: Doubler) -> str:
        return f"{context.partition_key} {upstream * doubler.factor} {len(batch)}"

    queue.enqueue(files(2))
    result = dg.materialize(
        [upstream, downstream], resources={"landing": landing, "doubler": Doubler()}, partition_key="tue"
    )
    assert result.output_for_node("downstream") == "tue 40 2"


def test_an_output_that_cannot_be_stored_gives_the_work_back(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    class Broken(dg.ConfigurableIOManager):  # type: ignore[misc]
        def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
            raise OSError("no space left")

        def load_input(self, context: dg.InputContext) -> Any: ...

    @leased_asset(queue="landing")
    def unstored(batch: LeasedBatch) -> int:
        return 1

    queue.enqueue(files(3))
    result = dg.materialize([unstored], resources={"landing": landing, "io_manager": Broken()}, raise_on_error=False)
    assert not result.success
    assert (queue.stats().active, queue.stats().pending, queue.stats().completed) == (0, 3, 0)


def test_a_lease_that_was_lost_cannot_be_completed(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_asset(queue="landing")
    def slow(batch: LeasedBatch) -> int:
        for lease in batch.leases:
            queue.release(lease.token)
        assert len(queue.lease("somebody else", 10)) == 2
        return 1

    queue.enqueue(files(2))
    result = run(slow, landing, ok=False)
    [failure] = result.filter_events(lambda event: event.is_step_failure)
    assert "LeaseRefused" in str(failure.step_failure_data.error) or "LeaseLost" in str(failure.step_failure_data.error)
    assert queue.stats().active == 2
    assert queue.stats().completed == 0


def test_an_op_leases_too(landing: LeaseQueueResource, queue: LeaseQueue) -> None:
    @leased_op(queue="landing", batch_size=3)
    def work(context: dg.OpExecutionContext, batch: LeasedBatch) -> int:
        return len(batch)

    @dg.job
    def job() -> None:
        work()

    queue.enqueue(files(3))
    result = job.execute_in_process(resources={"landing": landing})
    assert (result.output_for_node("work"), queue.stats().completed) == (3, 3)
    assert job.execute_in_process(resources={"landing": landing}).success


def test_the_multiprocess_executor_runs_it(tmp_path: Path, queue: LeaseQueue) -> None:
    queue.enqueue(files(3))
    with dg.instance_for_test() as instance:
        job = dg.reconstructable(fabric_job)
        settings = {"url": f"sqlite:///{tmp_path}/fabric.db", "namespace": "landing"}
        with dg.execute_job(job, instance, run_config={"resources": {"landing": {"config": settings}}}) as result:
            assert result.success
    assert queue.stats().completed == 3


@leased_op(queue="landing", batch_size=3)
def leasing_op(batch: LeasedBatch) -> list[str]:
    return [item.resource_id for item in batch.items]


@dg.job(resource_defs={"landing": LeaseQueueResource.configure_at_launch()})
def _fabric() -> None:
    leasing_op()


def fabric_job() -> dg.JobDefinition:
    return _fabric


def test_the_plain_way(queue: LeaseQueue) -> None:
    queue.enqueue(files(4))
    with lease_batch(queue, "script", limit=2) as batch:
        assert [lease.item.resource_id for lease in batch] == ["f0", "f1"]
    with pytest.raises(KeyError), lease_batch(queue, "script", limit=1):
        raise KeyError("x")
    with pytest.raises(KeyboardInterrupt), lease_batch(queue, "script", limit=1):
        raise KeyboardInterrupt
    assert [(s.state, s.attempt) for s in queue.inspect([1, 2, 3, 4])] == [
        ("completed", 1),
        ("completed", 1),
        ("pending", 1),
        ("pending", 0),
    ]


def test_a_batch_as_a_table(queue: LeaseQueue) -> None:
    queue.enqueue(WorkItem("file", "ü.json", attributes={"a": "b"}, body=b"\x00\xff", priority=2))
    with lease_batch(queue, "script") as batch:
        frame, table = batch.to_pandas(), batch.to_arrow()
    assert frame.loc[0, "resource_id"] == "ü.json"
    assert table.schema.field("enqueued_at").type.tz == "UTC"
    assert table.to_pylist()[0]["attributes"] == [("a", "b")]
    assert table.to_pylist()[0]["body"] == b"\x00\xff"
    with lease_batch(queue, "script") as empty:
        assert empty.to_arrow().schema == table.schema


def test_a_batch_that_was_taken_over_completes_nothing(queue: LeaseQueue) -> None:
    queue.enqueue(files(3))

    def as_a_zombie() -> None:
        with lease_batch(queue, "zombie", limit=3) as batch:
            queue.release_owner("zombie")
            queue.lease("winner", 1)
            batch.complete({"uri": "mine"})

    with pytest.raises(LeaseRefused):
        as_a_zombie()
    assert queue.stats().completed == 0


@pytest.mark.parametrize(("library", "call"), [("pandas", "to_pandas"), ("pyarrow", "to_arrow")])
def test_a_missing_library_is_named_with_its_extra(queue: Any, monkeypatch: Any, library: str, call: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with lease_batch(queue, "worker") as batch, pytest.raises(ImportError, match=r"omnirelay-dagster\[dataframes\]"):
        getattr(batch, call)()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"queue": "no good"}, "queue: 'no good' must be the key of a LeaseQueueResource"),
        ({"queue": "landing", "batch_size": 0}, "batch_size"),
        ({"queue": "landing", "batch_size": True}, "batch_size"),
        ({"queue": "landing", "on_empty": "cry"}, "on_empty"),
        ({"queue": "landing", "wait": -1}, "wait"),
        ({"queue": "landing", "wait": "60"}, "wait: must be seconds, above 0"),
        ({"queue": "landing", "drain": True, "max_batches": 0}, "max_batches: must be a whole number, above 0"),
        ({"queue": "landing", "drain": True, "max_seconds": -1}, "max_seconds"),
        ({"queue": "landing", "max_batches": 3}, "drain=True"),
    ],
)
def test_bad_settings_are_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=words):
        leased_asset(**arguments)(lambda batch: None)


def test_a_body_with_the_wrong_parameters_is_refused_in_words() -> None:
    def without(context: Any) -> None: ...

    def per_batch(batch: Any) -> None: ...

    def twice(batch: Any, landing: Any) -> None: ...

    with pytest.raises(dg.DagsterInvalidDefinitionError, match="must take a parameter named 'batch'"):
        leased_asset(queue="landing")(without)
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=r"named 'lease' .found 'batch'; per_item=True"):
        leased_asset(queue="landing", per_item=True)(per_batch)
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="has the queue's name"):
        leased_asset(queue="landing")(twice)
