"""The relay sensor, ticked by the daemon's own code on a real instance: every event once, in bounded ticks."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.test_utils import create_test_daemon_workspace_context
from dagster._core.workspace.load_target import PythonFileTarget
from dagster._daemon.sensor import execute_sensor_iteration

from lease_core import LeaseEvent, LeaseQueue
from lease_core.replication import (
    Batch,
    JsonlSink,
    MemorySink,
    RefusedForGood,
    Relay,
    Rules,
    SinkUnavailable,
    each_event,
    read_jsonl,
)
from omnirelay_dagster import LeaseQueueResource, build_relay_sensor, lease_queue_definitions
from tests.replication.conftest import work

CONFIG = """
[sinks.files]
type = "jsonl"
path = "{folder}/files"

[sinks.table]
type = "sql"
url = "sqlite:///{folder}/copy.db"
"""

FABRIC = """
import dagster as dg
from omnirelay_dagster import LeaseQueueResource, build_relay_sensor

defs = dg.Definitions(
    sensors=[build_relay_sensor("landing", config={config!r}, minimum_interval_seconds=1)],
    resources={{"landing": LeaseQueueResource(url={url!r}, namespace="landing")}},
)
"""


class Flaky:
    """A sink that can be out of order."""

    name = "flaky"

    def __init__(self) -> None:
        self.down = True
        self.seen: list[LeaseEvent] = []

    def deliver(self, batch: Batch) -> None:
        if self.down:
            raise ConnectionError("nobody is there")
        self.seen += batch


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


@pytest.fixture
def queue(landing: LeaseQueueResource) -> LeaseQueue:
    return landing.get_queue()


@pytest.fixture
def tick(landing: LeaseQueueResource, instance: dg.DagsterInstance) -> Callable[[dg.SensorDefinition], Any]:
    def evaluate(sensor: dg.SensorDefinition) -> Any:
        with dg.build_sensor_context(instance=instance, resources={"landing": landing}) as context:
            return sensor.evaluate_tick(context)

    return evaluate


def test_a_tick_delivers_what_there_is_and_says_where_each_sink_stands(
    queue: LeaseQueue, tick: Any, tmp_path: Path
) -> None:
    sensor = build_relay_sensor("landing", sinks=lambda: [JsonlSink(tmp_path / "copy"), MemorySink()])
    assert tick(sensor).skip_message.startswith("sink jsonl")
    for _ in range(2):
        head = work(queue, 100)
        found = tick(sensor)
        assert json.loads(found.cursor)["jsonl"] == {"position": head, "behind": 0, "delivered": 300}
        assert f"sink jsonl is at event {head}, 0 behind" in found.skip_message
    assert list(read_jsonl(tmp_path / "copy").read(strict=True)) == list(each_event(queue))
    assert queue.readers() == {"relay/jsonl": head, "relay/memory": head}


def test_a_failing_sink_fails_the_tick_after_the_others_were_served(
    queue: LeaseQueue, tick: Any, tmp_path: Path
) -> None:
    flaky = Flaky()
    sensor = build_relay_sensor("landing", sinks=lambda: [flaky, JsonlSink(tmp_path / "copy")])
    head = work(queue, 50)
    with pytest.raises(
        SinkUnavailable, match="sink flaky cannot go on at event 0, 150 behind: ConnectionError: nobody"
    ):
        tick(sensor)
    assert list(read_jsonl(tmp_path / "copy").read()) == list(each_event(queue))
    flaky.down = False
    assert json.loads(tick(sensor).cursor)["flaky"]["position"] == head
    assert flaky.seen == list(each_event(queue))


def test_a_tick_is_bounded_and_the_next_goes_on(queue: LeaseQueue, tick: Any) -> None:
    seen: list[int] = []

    class Slow:
        name = "slow"

        def deliver(self, batch: Batch) -> None:
            seen.extend(batch.numbers)

    sensor = build_relay_sensor("landing", sinks=Slow, rules=Rules(batch_size=30), max_seconds_per_tick=1e-6)
    head = work(queue, 50)
    positions = []
    while not positions or positions[-1] < head:
        positions.append(json.loads(tick(sensor).cursor)["slow"]["position"])
    assert positions == [30, 60, 90, 120, 150]
    assert seen == list(range(1, head + 1))


def test_refused_events_are_recorded_and_a_process_can_take_over(queue: LeaseQueue, tick: Any, tmp_path: Path) -> None:
    class Picky:
        name = "picky"

        def deliver(self, batch: Batch) -> None:
            if 7 in batch.numbers:
                raise RefusedForGood("seven", 7)

    rules = Rules(on_refusal="skip")
    tick_it = build_relay_sensor("landing", sinks=Picky, rules=rules, refused=tmp_path / "refused.jsonl")
    head = work(queue, 10)
    tick(tick_it)
    assert len((tmp_path / "refused.jsonl").read_text().splitlines()) == 1
    [status] = Relay(queue, Picky()).run_once()
    assert (status.position, status.delivered) == (head, 0), "a relay of another kind goes on from there"


def test_a_file_under_the_daemon(queue: LeaseQueue, landing: LeaseQueueResource, tmp_path: Path) -> None:
    """In a code location of its own, with the ticks that the UI shows."""
    config, location = tmp_path / "omnirelay.toml", tmp_path / "fabric.py"
    config.write_text(CONFIG.format(folder=tmp_path))
    location.write_text(FABRIC.format(config=str(config), url=landing.url))
    head = work(queue, 100)
    target = PythonFileTarget(str(location), None, None, "fabric")
    with (
        dg.instance_for_test() as instance,
        create_test_daemon_workspace_context(target, instance=instance) as workspace,
    ):
        list(execute_sensor_iteration(workspace, logging.getLogger(), None, None))
        [state] = instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
        [done] = instance.get_ticks(state.instigator_origin_id, state.selector_id)
        assert done.status.value == "SKIPPED"
        assert f"sink files is at event {head}, 0 behind" in str(done.skip_reason)
        assert json.loads(str(done.cursor))["table"]["position"] == head
    assert list(read_jsonl(tmp_path / "files").read(strict=True)) == list(each_event(queue))


def test_a_sink_that_is_a_copy_of_another_queue_fails_the_tick(queue: LeaseQueue, tick: Any, tmp_path: Path) -> None:
    sensor = build_relay_sensor("landing", sinks=lambda: JsonlSink(tmp_path / "copy"))
    work(queue, 10)
    tick(sensor)
    with LeaseQueue.open("sqlite://", "landing") as other:
        work(other, 1_000)
        shutil.rmtree(tmp_path / "copy")
        with Relay(other, JsonlSink(tmp_path / "copy")) as relay:
            assert relay.wait_until(3_000, 60)
    with pytest.raises(SinkUnavailable, match=r"HistoryDiffers.*stays there until that is put right"):
        tick(sensor)


def test_mistakes_are_refused_at_load(tmp_path: Path) -> None:
    for wrong, said in (
        ({}, "give one of them"),
        ({"sinks": MemorySink, "config": "x.toml"}, "give one of them"),
        ({"sinks": MemorySink()}, "must be a function"),
        ({"config": tmp_path / "none.toml"}, "there is no file"),
        ({"sinks": MemorySink, "max_seconds_per_tick": 0}, "max_seconds_per_tick"),
    ):
        with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
            build_relay_sensor("landing", **wrong)
    defs = lease_queue_definitions(queue="landing", relay={"sinks": MemorySink})
    assert "landing_relay_sensor" in [sensor.name for sensor in defs.sensors or []]
