"""What a leased body runs on Spark is one job group, and is gone when its lease is."""

from __future__ import annotations

import datetime as dt
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource, PySparkResource
from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster import batch as batch_module
from omnirelay_dagster.asset_decorator import leased_asset, leased_op
from omnirelay_dagster.batch import LeasedBatch, lease_batch
from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.spark import job_group
from omnirelay_dagster.spark.job_group import group_name
from tests.spark.leasing import enqueue, take, until

CONFIG: dict[str, Any] = {"spark.sql.shuffle.partitions": "2"}


def endless(spark: SparkSession) -> DataFrame:
    """A frame whose tasks do not end before somebody ends them."""

    def sleep(batches: Iterator[Any]) -> Iterator[Any]:
        for each in batches:
            time.sleep(600)
            yield each

    return spark.range(2, numPartitions=2).mapInArrow(sleep, "id LONG")


def running(spark: SparkSession, group: str) -> bool:
    tracker = spark.sparkContext.statusTracker()
    return bool(set(tracker.getActiveJobsIds()) & set(tracker.getJobIdsForGroup(group)))


def take_away(landing: LeaseQueueResource, lease_id: str) -> None:
    """Another process fails the items, with the tokens of their holder: the next heartbeat is refused."""
    with LeaseQueue.open(landing.url, "landing") as queue:
        held = [lease.token for lease in queue.leases() if lease.token.lease_id == lease_id]
        queue.fail(held, "taken away", delay=0)


def property_of(spark: SparkSession) -> str | None:
    return spark.sparkContext.getLocalProperty("spark.jobGroup.id")


def run(asset: Any, landing: LeaseQueueResource, **more: Any) -> dg.ExecuteInProcessResult:
    resources = {"landing": landing, "io_manager": dg.mem_io_manager, **more}
    return dg.materialize([asset], resources=resources, instance=dg.DagsterInstance.ephemeral(), raise_on_error=False)


# The items


def test_leased_items_as_a_frame(spark: SparkSession, landing: LeaseQueueResource) -> None:
    queue = landing.get_queue()
    full = WorkItem("file", "naïve 東京 🚚", "p", {"a": "1", "ü": ""}, b"\x00\xff", "raw", "r-1", priority=-3)
    queue.enqueue([full, WorkItem("file", "b")])
    with take(queue) as batch:
        frame = batch.to_spark(spark)
        assert frame.schema.simpleString() == (
            "struct<sequence_id:bigint,attempt:bigint,resource_type:string,resource_id:string,partition_key:string,"
            "priority:bigint,request_id:string,attributes:map<string,string>,payload_encoding:string,body:binary,"
            "enqueued_at:timestamp>"
        )
        rows = {row.resource_id: row for row in frame.collect()}
        first = rows["naïve 東京 🚚"]
        assert (first.partition_key, first.attributes, bytes(first.body)) == ("p", {"a": "1", "ü": ""}, b"\x00\xff")
        assert (first.request_id, first.priority, first.payload_encoding, first.attempt) == ("r-1", -3, "raw", 1)
        assert (rows["b"].partition_key, rows["b"].attributes, rows["b"].request_id) == (None, {}, None)
        stamp = batch.leases[0].enqueued_at
        assert frame.where(f.col("enqueued_at") == f.lit(stamp)).count() >= 1
        assert abs(stamp - dt.datetime.now(dt.UTC)) < dt.timedelta(hours=1)


def test_ten_thousand_items_are_spread_over_tasks(spark: SparkSession, landing: LeaseQueueResource) -> None:
    queue = landing.get_queue()
    queue.enqueue([WorkItem("file", f"f{n}", body=b"x" * 100) for n in range(10_000)])
    with take(queue, 10_000) as batch:
        frame = batch.to_spark(spark)
        assert frame.selectExpr("count(DISTINCT resource_id)", "sum(length(body))").first() == (10_000, 1_000_000)
        assert frame.rdd.getNumPartitions() >= 2


# The group


@pytest.mark.parametrize("kind", [PySparkResource, LazyPySparkResource])
def test_resources_of_a_body_are_in_the_group_by_themselves(
    kind: Any, spark: SparkSession, landing: LeaseQueueResource
) -> None:
    enqueue(landing, "a", "b")
    seen: dict[str, Any] = {}

    def bronze(batch: LeasedBatch, pyspark: Any) -> None:
        session = pyspark.spark_session
        seen["group"] = property_of(session)
        seen["expected"] = group_name("landing", batch.id)
        session.range(10).count()
        thread = InheritableThread(target=lambda: seen.update(inherited=property_of(session)))
        thread.start()
        thread.join()
        seen["jobs"] = len(session.sparkContext.statusTracker().getJobIdsForGroup(seen["expected"]))
        seen["description"] = session.sparkContext.getLocalProperty("spark.job.description")

    bronze.__annotations__["pyspark"] = kind
    asset = leased_asset(queue="landing")(bronze)
    assert run(asset, landing, pyspark=kind(spark_config=CONFIG)).success
    assert seen["group"] == seen["inherited"] == seen["expected"]
    assert seen["jobs"] >= 1
    assert seen["description"].startswith("2 items of landing, lease ")
    assert property_of(spark) is None


def test_the_same_for_ops_and_for_resources_by_key(spark: SparkSession, landing: LeaseQueueResource) -> None:
    enqueue(landing, "a")
    seen = []

    @leased_op(queue="landing", required_resource_keys={"pyspark"})
    def work(context: dg.OpExecutionContext, batch: LeasedBatch) -> None:
        seen.append(property_of(spark) == group_name("landing", batch.id))

    @dg.job(resource_defs={"landing": landing, "pyspark": LazyPySparkResource(spark_config=CONFIG)})
    def job() -> None:
        work()

    assert job.execute_in_process(instance=dg.DagsterInstance.ephemeral()).success
    assert seen == [True]


class Untouched(LazyPySparkResource):
    @property
    def spark_session(self) -> Any:
        raise AssertionError("there was no work")


def test_without_work_a_lazy_resource_starts_nothing(landing: LeaseQueueResource) -> None:
    @leased_asset(queue="landing")
    def bronze(batch: LeasedBatch, pyspark: Untouched) -> None:
        raise AssertionError("there was no work")

    assert run(bronze, landing, pyspark=Untouched(spark_config={})).success


def test_what_is_no_session_is_refused(landing: LeaseQueueResource) -> None:
    enqueue(landing, "a")
    with (
        take(landing.get_queue()) as batch,
        pytest.raises(TypeError, match=r"spark: a builtins\.str is no Spark session"),
    ):
        batch.to_spark("local[*]")


# The end of the lease


def test_a_lost_lease_cancels_the_jobs_and_is_named_as_the_cause(
    spark: SparkSession, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = LeaseQueueResource(url=f"sqlite:///{tmp_path}/fabric.db", namespace="landing", lease_duration=10.0)
    enqueue(landing, "a")
    seen: dict[str, Any] = {}

    @leased_asset(queue="landing")
    def bronze(batch: LeasedBatch, pyspark: PySparkResource) -> int:
        seen["group"] = group_name("landing", batch.id)
        thief = threading.Thread(
            target=lambda: (until(lambda: running(spark, seen["group"])), take_away(landing, batch.id))
        )
        thief.start()
        try:
            return endless(pyspark.spark_session).count()
        except Exception:
            seen["second"] = None
            with pytest.raises(Exception, match="ancel"):  # a body that goes on regardless does not get far
                endless(pyspark.spark_session).count()
            raise
        finally:
            thief.join()

    result = run(bronze, landing, pyspark=PySparkResource(spark_config=CONFIG))
    assert not result.success
    [failure] = result.get_step_failure_events()
    error = failure.step_failure_data.error
    assert error is not None
    assert error.cause is not None
    assert "LeaseLost" in str(error.cause.cls_name)
    assert "second" in seen
    until(lambda: not running(spark, seen["group"]))
    landing.get_queue().close()


def test_a_lease_lost_while_the_output_is_written(spark: SparkSession, fenced: FencedIOManager) -> None:
    fenced = FencedIOManager(
        base_path=fenced.base_path,
        queue=LeaseQueueResource(url=fenced.queue.url, namespace="landing", lease_duration=10.0),
    )
    enqueue(fenced.queue, "a")

    @leased_asset(queue="landing", io_manager_key="fenced")
    def bronze(batch: LeasedBatch) -> DataFrame:
        batch.spark_group(spark)
        name = group_name("landing", batch.id)
        threading.Thread(
            target=lambda: (until(lambda: running(spark, name)), take_away(fenced.queue, batch.id))
        ).start()
        return endless(spark)

    result = run(bronze, fenced.queue, fenced=fenced)
    assert not result.success
    assert "LeaseLost" in str(result.get_step_failure_events()[0].step_failure_data.error)
    assert fenced.published("bronze") == []
    fenced.queue.get_queue().close()


def test_an_interrupted_block_cancels_first_and_leaves_the_session_usable(
    spark: SparkSession, landing: LeaseQueueResource
) -> None:
    enqueue(landing, "a")
    queue = landing.get_queue()
    ended: list[Exception] = []
    group: list[str] = []

    def work() -> None:
        try:
            endless(spark).count()
        except Exception as error:
            ended.append(error)

    def interrupted() -> None:
        with lease_batch(queue, "worker") as batch:
            group.append(batch.spark_group(spark).id)
            InheritableThread(target=work, daemon=True).start()
            until(lambda: running(spark, group[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    until(lambda: not running(spark, group[0]))
    until(lambda: ended)
    assert queue.stats().pending == 1
    assert property_of(spark) is None
    assert spark.range(5).count() == 5


def test_a_signal_ends_the_jobs_before_a_body_cleans_up_on_spark(
    spark: SparkSession, landing: LeaseQueueResource
) -> None:
    """What is called on the way out would otherwise wait for the job that should end."""
    enqueue(landing, "a")
    seen: dict[str, Any] = {}

    @leased_asset(queue="landing")
    def bronze(batch: LeasedBatch, pyspark: PySparkResource) -> int:
        group = group_name("landing", batch.id)
        threading.Thread(
            target=lambda: (until(lambda: running(spark, group)), os.kill(os.getpid(), signal.SIGINT))
        ).start()
        try:
            return endless(pyspark.spark_session).count()
        finally:
            seen["rows"] = pyspark.spark_session.range(3).count()
            seen["running"] = running(spark, group)

    before = signal.getsignal(signal.SIGINT)
    assert not run(bronze, landing, pyspark=PySparkResource(spark_config=CONFIG)).success
    assert seen == {"rows": 3, "running": False}
    assert landing.get_queue().stats().pending == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert property_of(spark) is None


# Progress


def test_stages_are_told_at_a_sane_rate(
    spark: SparkSession, landing: LeaseQueueResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_group, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(batch_module, "_SAY_EVERY", 0.3)
    enqueue(landing, "a")
    said: list[str] = []

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        for each in batches:
            time.sleep(0.4)
            yield each

    with take(landing.get_queue(), say=said.append) as batch:
        frame = batch.to_spark(spark).crossJoin(spark.range(6, numPartitions=6)).select("id").repartition(6)
        assert frame.mapInArrow(slowly, "id LONG").count() == 6
        batch.complete()
    during, last = said[:-1], said[-1]
    assert during
    assert all(text.startswith("Spark: ") and " tasks" in text and "running in stage" in text for text in during)
    assert last.startswith("Spark: ")
    assert last.endswith(f"under lease {batch.id}")
    assert "jobs" in last or "1 job" in last
    assert len(during) < 60
