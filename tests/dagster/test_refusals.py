"""Bad configuration is refused when definitions load, in words that say what to change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from omnirelay_dagster import (
    FencedIOManager,
    LeaseQueueResource,
    build_backpressure_sensor,
    build_observation_sensor,
    build_replication_sensor,
    build_run_status_sensors,
    build_work_sensor,
    check_definitions,
    lease_queue_definitions,
    leased_asset,
    leased_op,
)

QUEUE = LeaseQueueResource(url="sqlite:///fabric.db", namespace="landing")


@leased_asset(queue="landing")
def bronze(batch: Any) -> list[str]:
    return [item.resource_id for item in batch.items]


@dg.asset
def plain() -> int:
    return 1


@dg.asset
def unannotated():  # type: ignore[no-untyped-def]
    return 1


def fenced(queue: LeaseQueueResource = QUEUE) -> FencedIOManager:
    return FencedIOManager(base_path="out", queue=queue)


def load(*parts: dg.Definitions) -> None:
    """As a code location loads them: everything is resolved, nothing runs."""
    dg.Definitions.validate_loadable(dg.Definitions.merge(*parts))


def refusal(define: Callable[[], object]) -> str:
    """What the refusal says, with what it was raised from."""
    with pytest.raises(dg.DagsterError) as caught:
        define()
    told, error = "", caught.value
    while error is not None:
        told += f"{error}\n"
        error = error.__cause__  # type: ignore[assignment]
    return told


def with_resources(*assets: Any, **resources: Any) -> dg.Definitions:
    return dg.Definitions(assets=assets, resources=resources)


# The six of the list


def test_an_unknown_queue() -> None:
    told = refusal(lambda: load(with_resources(bronze, landng=QUEUE)))
    assert "'landing' required by op 'bronze' was not provided: there is no such queue" in told
    assert "resources={'landing': LeaseQueueResource(url=...)}, or name one that is there: 'landng'" in told


def test_an_unknown_queue_of_the_queue_definitions() -> None:
    told = refusal(lambda: load(lease_queue_definitions(queue="landing"), with_resources(landng=QUEUE)))
    assert "there is no such queue" in told
    assert "'landng'" in told


@pytest.mark.parametrize("url", ["fabric.db", "mysql://root:hidden@host/db", ""])
def test_a_wrong_url(url: str) -> None:
    told = refusal(lambda: load(with_resources(bronze, landing=LeaseQueueResource(url=url, namespace="landing"))))
    assert "LeaseQueueResource(namespace='landing'): url: " in told
    assert "sqlite:///" in told
    assert "hidden" not in told


def clashing(with_a_body: bool) -> dg.Definitions:
    @dg.asset(key=["queues", "landing"])
    def mine() -> None: ...

    other = mine if with_a_body else dg.AssetSpec(["queues", "landing"])
    return dg.Definitions.merge(
        with_resources(other, landing=QUEUE),
        lease_queue_definitions(queue="landing"),
    )


@pytest.mark.parametrize("with_a_body", [True, False], ids=["asset", "spec"])
def test_clashing_asset_keys(with_a_body: bool) -> None:
    assert "queues" in refusal(lambda: load(clashing(with_a_body)))
    told = refusal(lambda: check_definitions(clashing(with_a_body)))
    assert "'queues/landing' is the key of the asset that stands for the queue 'landing', and of another asset" in told
    assert "lease_queue_definitions(queue='landing', asset_key=...)" in told


def test_the_key_of_the_asset_that_works_on_the_queue() -> None:
    told = refusal(lambda: load(lease_queue_definitions(queue="landing", asset=bronze, asset_key="bronze")))
    assert "the queue's own asset needs another one, such as 'queues/landing'" in told


@pytest.mark.parametrize("marks", [{"high_watermark": -1}, {"high_watermark": 5, "low_watermark": -1}])
def test_a_mark_below_zero(marks: dict[str, int]) -> None:
    told = refusal(lambda: load(with_resources(bronze, landing=LeaseQueueResource(url="sqlite://", **marks))))
    assert f"{list(marks)[-1]}: " in told
    assert "greater than or equal to" in told


@pytest.mark.parametrize("queue", [{}, {"queue": None}, {"queue": "landing"}])
def test_an_io_manager_without_a_queue(queue: dict[str, Any]) -> None:
    told = refusal(lambda: load(with_resources(landing=QUEUE, io_manager=FencedIOManager(base_path="out", **queue))))
    assert "give it the LeaseQueueResource whose leases publish its outputs" in told


def no_batch(context: Any) -> None: ...


def lease_not_batch(lease: Any) -> None: ...


def context_last(batch: Any, context: Any) -> None: ...


def named_as_the_queue(batch: Any, landing: Any) -> None: ...


@pytest.mark.parametrize("decorator", [leased_asset, leased_op])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (no_batch, "must take a parameter named 'batch', as in def no_batch(context, batch)"),
        (lease_not_batch, "named 'batch' (found 'lease'; per_item=False)"),
        (context_last, "context must be the first parameter"),
        (named_as_the_queue, "the parameter 'landing' has the queue's name"),
    ],
)
def test_a_body_with_a_wrong_signature(decorator: Any, body: Any, words: str) -> None:
    assert words in refusal(lambda: decorator(queue="landing")(body))


# A queue that is none


@pytest.mark.parametrize("value", ["sqlite:///fabric.db", 3, fenced()], ids=["str", "int", "io manager"])
def test_something_else_under_the_queues_key(value: Any) -> None:
    told = refusal(lambda: load(with_resources(bronze, landing=value)))
    assert f"'landing' required by op 'bronze' must be a queue, and is a {type(value).__name__}" in told
    assert "LeaseQueueResource(url=...)" in told
    assert "must be a queue" in refusal(
        lambda: load(lease_queue_definitions(queue="landing"), with_resources(landing=value))
    )


def test_an_op_is_told_the_same() -> None:
    @leased_op(queue="landing")
    def work(batch: Any) -> None: ...

    @dg.job
    def working() -> None:
        work()

    told = refusal(lambda: load(dg.Definitions(jobs=[working], resources={"landing": "sqlite://"})))
    assert "must be a queue, and is a str" in told
    load(dg.Definitions(jobs=[working], resources={"landing": QUEUE}))


def test_what_may_be_a_queue_passes() -> None:
    class Mine(LeaseQueueResource): ...

    @dg.resource
    def made(_: Any) -> LeaseQueueResource:
        return QUEUE

    for queue in (QUEUE, Mine(url="sqlite://"), made, LeaseQueueResource.configure_at_launch()):
        load(with_resources(bronze, landing=queue))


# Lone sensors


LONE: dict[str, Callable[[], list[dg.SensorDefinition]]] = {
    "observation": lambda: [build_observation_sensor("landing")],
    "backpressure": lambda: [build_backpressure_sensor("landing", pool_limits={"ingest": 1})],
    "replication": lambda: [build_replication_sensor("landing")],
    "run_status": lambda: build_run_status_sensors("landing"),
    "work": lambda: [build_work_sensor("landing", target=plain)],
}


@pytest.mark.parametrize("kind", LONE)
def test_a_lone_sensor_without_its_queue(kind: str) -> None:
    def definitions(**resources: Any) -> dg.Definitions:
        return dg.Definitions(assets=[plain], sensors=LONE[kind](), resources=resources)

    told = refusal(lambda: check_definitions(definitions(landng=QUEUE)))
    assert "'landing' required by sensor 'landing_" in told
    assert "name one that is there: 'landng'" in told
    assert "must be a queue, and is a str" in refusal(lambda: check_definitions(definitions(landing="sqlite://")))
    whole = definitions(landing=QUEUE)
    assert check_definitions(whole) is whole


def test_the_check_refuses_in_a_fresh_process_too(tmp_path: Path) -> None:
    (tmp_path / "fabric.py").write_text(
        "import dagster as dg\n"
        "from omnirelay_dagster import LeaseQueueResource, build_observation_sensor, check_definitions\n"
        "landing = LeaseQueueResource(url='sqlite:///fabric.db')\n"
        "sensor = build_observation_sensor('landng')\n"
        "defs = check_definitions(dg.Definitions(sensors=[sensor], resources={'landing': landing}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "dagster", "definitions", "validate", "-f", "fabric.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode != 0
    assert "'landng' required by sensor 'landng_observation_sensor' was not provided" in done.stdout + done.stderr


# The fenced IO manager


@pytest.mark.parametrize("asset", [plain, unannotated], ids=["annotated", "not annotated"])
def test_a_plain_asset_under_the_fenced_io_manager(asset: Any) -> None:
    name = asset.key.to_user_string()
    told = refusal(lambda: load(with_resources(bronze, asset, landing=QUEUE, io_manager=fenced())))
    assert f"asset '{name}' stores its output with the fenced IO manager 'io_manager'" in told
    assert "give it another IO manager (io_manager_key=...)" in told


def test_also_when_the_queue_definitions_are_all_that_is_leased_about() -> None:
    told = refusal(
        lambda: load(
            lease_queue_definitions(queue="landing"), with_resources(plain, landing=QUEUE, io_manager=fenced())
        )
    )
    assert "asset 'plain' stores its output with the fenced IO manager" in told


def test_with_nothing_of_a_queue_around_it_takes_the_check() -> None:
    defs = with_resources(plain, io_manager=fenced())
    load(defs)
    assert "asset 'plain' stores its output" in refusal(lambda: check_definitions(defs))


def test_a_plain_op_under_the_fenced_io_manager_takes_the_check() -> None:
    @leased_op(queue="landing")
    def first(batch: Any) -> list[int]:
        return [1]

    @dg.op
    def second(values: Any) -> int:
        return len(values)

    @dg.job
    def both() -> None:
        second(first())

    defs = dg.Definitions(jobs=[both], resources={"landing": QUEUE, "io_manager": fenced()})
    assert "op 'second' of job 'both' stores its output" in refusal(lambda: check_definitions(defs))


def test_assets_that_store_their_output_themselves_pass() -> None:
    @dg.asset
    def nothing() -> None: ...

    @dg.asset
    def result() -> dg.MaterializeResult:  # type: ignore[type-arg]
        return dg.MaterializeResult()

    @dg.asset
    def unsaid():  # type: ignore[no-untyped-def]
        return dg.MaterializeResult()

    @dg.asset
    def yielded():  # type: ignore[no-untyped-def]
        yield dg.MaterializeResult()

    @dg.multi_asset(specs=[dg.AssetSpec("a"), dg.AssetSpec("b")])
    def several() -> Iterator[Any]:
        yield dg.MaterializeResult(asset_key="a")

    @dg.asset_check(asset=bronze)
    def checked() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    @dg.asset(io_manager_key="own")
    def elsewhere() -> int:
        return 1

    @dg.graph_asset
    def drawn() -> Any:
        return leased_op(queue="landing", name="inner")(lambda batch: [])()

    assets = [bronze, nothing, result, unsaid, yielded, several, elsewhere, drawn, dg.AssetSpec("outside")]
    check_definitions(
        dg.Definitions(
            assets=assets,
            asset_checks=[checked],
            resources={"landing": QUEUE, "io_manager": fenced(), "own": dg.mem_io_manager},
        )
    )


def test_an_io_manager_of_another_queue() -> None:
    other = LeaseQueueResource(url="sqlite:///fabric.db", namespace="rebuilds")
    told = refusal(lambda: load(with_resources(bronze, landing=QUEUE, io_manager=fenced(other))))
    assert (
        "op 'bronze' leases from the namespace 'landing', but its IO manager 'io_manager' publishes to 'rebuilds'"
        in told
    )
    from_environment = LeaseQueueResource(url="sqlite:///fabric.db", namespace=dg.EnvVar("WHICH"))
    load(with_resources(bronze, landing=QUEUE, io_manager=fenced(from_environment)))


# What is changed about an asset afterwards stays refused


def test_a_renamed_or_changed_asset_is_still_leased_work() -> None:
    renamed = bronze.with_attributes(asset_key_replacements={bronze.key: bronze.key.with_prefix("raw")})
    again = renamed.map_asset_specs(lambda spec: spec.replace_attributes(tags={"team": "ingest"}))
    told = refusal(lambda: load(with_resources(again, landing="sqlite://", io_manager=fenced())))
    assert "must be a queue" in told
    load(with_resources(again, landing=QUEUE, io_manager=fenced()))
