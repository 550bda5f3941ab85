"""The backpressure sensor, against a real instance: what it holds back, and that it lets go of its own doing only."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import InProcessCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from lease_core import LeaseQueue, WorkItem
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.sensors import BackpressureChange, build_backpressure_sensor

LOCATION = InProcessCodeLocationOrigin(
    loadable_target_origin=LoadableTargetOrigin(python_file="somewhere.py"), location_name="fabric"
)
REPOSITORY = "__repository__"


@dg.sensor(name="files", default_status=dg.DefaultSensorStatus.RUNNING)
def files(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    return dg.SkipReason("nothing landed")


@dg.sensor(name="idle")
def idle(context: dg.SensorEvaluationContext) -> dg.SkipReason:
    return dg.SkipReason("stopped unless somebody starts it")


class Fabric:
    """A queue with marks, an instance, and one backpressure sensor whose cursor is kept from tick to tick."""

    def __init__(self, instance: dg.DagsterInstance, path: Path) -> None:
        self.instance = instance
        self.resource = LeaseQueueResource(
            url=f"sqlite:///{path / 'fabric.db'}", namespace="landing", high_watermark=10, low_watermark=2
        )
        self.queue = LeaseQueue.open(self.resource.url, "landing", self.resource.queue_config())
        self.name = f"backpressure_{uuid.uuid4().hex}"
        self.cursor: str | None = None

    def forget(self) -> None:
        """Make the instance as good as new."""
        storage = self.instance.event_log_storage
        for pool in storage.get_pool_limits():
            storage.delete_concurrency_limit(pool.name)
        assert self.instance.schedule_storage
        self.instance.schedule_storage.wipe()

    def tick(self, **arguments: Any) -> dict[str, Any]:
        """One tick of a sensor that was made anew, as after a restart. Gives the cursor, parsed."""
        sensor = build_backpressure_sensor("landing", name=self.name, **arguments)
        defs = dg.Definitions(sensors=[sensor, files, idle], resources={"landing": self.resource})
        with dg.SensorEvaluationContext(
            instance_ref=self.instance.get_ref(),
            instance=self.instance,
            cursor=self.cursor,
            repository_name=REPOSITORY,
            repository_def=defs.get_repository_def(),
            sensor_name=sensor.name,
            code_location_origin=LOCATION,
        ).merge_resources({"landing": self.resource}) as context:
            found = sensor.evaluate_tick(context)
        self.cursor = found.cursor
        self.said = found.skip_message
        return json.loads(found.cursor) if found.cursor else {}

    def fill(self, upto: int = 10) -> None:
        have = self.queue.stats().pending
        self.queue.enqueue([WorkItem(resource_type="file", resource_id=f"f{n}") for n in range(upto - have)])

    def empty(self) -> None:
        self.queue.drain()

    def limit(self, pool: str) -> int | None:
        return {known.name: known.limit for known in self.instance.event_log_storage.get_pool_limits()}.get(pool)

    def set_limit(self, pool: str, limit: int) -> None:
        self.instance.event_log_storage.set_concurrency_slots(pool, limit)

    def sensor_state(self, name: str) -> InstigatorState | None:
        states = self.instance.all_instigator_state(instigator_type=InstigatorType.SENSOR)
        return next((state for state in states if state.name == name), None)

    def status(self, name: str) -> InstigatorStatus | None:
        state = self.sensor_state(name)
        return state.status if state else None

    def switch(self, name: str, status: InstigatorStatus, started_at: float | None = None) -> None:
        """What the switch in the UI does."""
        origin = RemoteRepositoryOrigin(code_location_origin=LOCATION, repository_name=REPOSITORY)
        data = SensorInstigatorData(last_sensor_start_timestamp=started_at, cursor="where it was")
        state = InstigatorState(origin.get_instigator_origin(name), InstigatorType.SENSOR, status, data)
        if self.sensor_state(name):
            self.instance.update_instigator_state(state)
        else:
            self.instance.add_instigator_state(state)


@pytest.fixture
def fabric(instance: dg.DagsterInstance, tmp_path: Path) -> Iterator[Fabric]:
    made = Fabric(instance, tmp_path)
    made.forget()
    yield made
    made.queue.close()


def test_pools_are_lowered_on_the_high_mark_and_restored_on_the_low_one(fabric: Fabric) -> None:
    fabric.set_limit("ingest", 5)
    limits = {"ingest": 1, "unlimited": 0}
    assert fabric.tick(pool_limits=limits) == {}
    fabric.fill()
    found = fabric.tick(pool_limits=limits)
    assert (fabric.limit("ingest"), fabric.limit("unlimited")) == (1, 0)
    assert found["backpressure"] == "on"
    assert found["pools"] == {"ingest": {"set": 1, "before": 5}, "unlimited": {"set": 0}}
    assert fabric.tick(pool_limits=limits) == found
    fabric.empty()
    found = fabric.tick(pool_limits=limits)
    assert (fabric.limit("ingest"), fabric.limit("unlimited")) == (5, None)
    assert found["backpressure"] == "off"
    assert "notes" not in found


def test_between_the_marks_nothing_changes(fabric: Fabric) -> None:
    fabric.fill(9)
    fabric.tick(pool_limits={"ingest": 1})
    assert fabric.limit("ingest") is None
    fabric.fill(10)
    fabric.tick(pool_limits={"ingest": 1})
    fabric.queue.drain(5)
    fabric.tick(pool_limits={"ingest": 1})
    assert fabric.limit("ingest") == 1, "not before the low mark"


def test_a_restart_with_other_definitions_undoes_what_was_set(fabric: Fabric) -> None:
    fabric.set_limit("ingest", 5)
    fabric.fill()
    fabric.tick(pool_limits={"ingest": 1})
    fabric.empty()
    fabric.tick(pool_limits={"another": 3})
    assert fabric.limit("ingest") == 5
    assert fabric.limit("another") is None


def test_what_a_lost_tick_did_is_undone(fabric: Fabric) -> None:
    """The daemon died after the limits were set and before the cursor was saved."""
    fabric.set_limit("ingest", 5)
    fabric.fill()
    fabric.tick(pool_limits={"ingest": 1})
    fabric.cursor = None
    again = fabric.tick(pool_limits={"ingest": 1})
    assert again["pools"]["ingest"]["before"] == 5, "not the 1 that it finds there"
    fabric.cursor = None
    fabric.empty()
    fabric.tick(pool_limits={"ingest": 1})
    assert fabric.limit("ingest") == 5
    fabric.cursor = None
    fabric.set_limit("ingest", 1)
    fabric.tick(pool_limits={"ingest": 1})
    assert fabric.limit("ingest") == 1, "and it is forgotten afterwards"


def test_a_limit_that_somebody_changed_stays(fabric: Fabric) -> None:
    fabric.set_limit("ingest", 5)
    fabric.fill()
    fabric.tick(pool_limits={"ingest": 1})
    fabric.set_limit("ingest", 3)
    fabric.tick(pool_limits={"ingest": 1})
    assert fabric.limit("ingest") == 3, "nor is it set again"
    fabric.empty()
    found = fabric.tick(pool_limits={"ingest": 1})
    assert fabric.limit("ingest") == 3
    assert "somebody changed its limit from 1 to 3" in found["notes"][0]
    assert "somebody changed" in fabric.said


def test_a_limit_that_is_lower_already_is_not_raised(fabric: Fabric) -> None:
    fabric.set_limit("ingest", 1)
    fabric.fill()
    found = fabric.tick(pool_limits={"ingest": 4})
    assert fabric.limit("ingest") == 1
    assert "pools" not in found
    fabric.set_limit("ingest", 2)
    fabric.empty()
    fabric.tick(pool_limits={"ingest": 4})
    assert fabric.limit("ingest") == 2


def test_a_default_limit_is_a_default_again(tmp_path: Path) -> None:
    with dg.instance_for_test(overrides={"concurrency": {"pools": {"default_limit": 4}}}) as instance:
        fabric = Fabric(instance, tmp_path)
        instance.event_log_storage.initialize_concurrency_limit_to_default("ingest")
        fabric.fill()
        fabric.tick(pool_limits={"ingest": 1})
        assert fabric.limit("ingest") == 1
        fabric.empty()
        fabric.tick(pool_limits={"ingest": 1})
        [pool] = instance.event_log_storage.get_pool_limits()
        assert (pool.name, pool.limit, pool.from_default) == ("ingest", 4, True)
        fabric.queue.close()


@pytest.mark.parametrize("before", [InstigatorStatus.DECLARED_IN_CODE, InstigatorStatus.RUNNING])
def test_sensors_are_stopped_and_started_as_they_were(fabric: Fabric, before: InstigatorStatus) -> None:
    fabric.switch("files", before, started_at=100.0)
    fabric.fill()
    found = fabric.tick(pause_sensors=["files"])
    assert fabric.status("files") == InstigatorStatus.STOPPED
    assert list(found["sensors"]) == ["files"]
    fabric.empty()
    fabric.tick(pause_sensors=["files"])
    assert fabric.status("files") == before
    state = fabric.sensor_state("files")
    assert state is not None
    assert state.sensor_instigator_data is not None
    assert state.sensor_instigator_data.cursor == "where it was"


def test_a_sensor_that_the_daemon_has_not_seen_yet_is_stopped_later(fabric: Fabric) -> None:
    """Adding its state here would race with the daemon, which fails if somebody else has added it."""
    fabric.fill()
    found = fabric.tick(pause_sensors=["files"])
    assert (found["later"], fabric.status("files")) == (["files"], None)
    fabric.switch("files", InstigatorStatus.DECLARED_IN_CODE, started_at=100.0)
    found = fabric.tick(pause_sensors=["files"])
    assert "later" not in found
    assert fabric.status("files") == InstigatorStatus.STOPPED
    fabric.cursor = None
    fabric.empty()
    fabric.tick(pause_sensors=["files"])
    assert fabric.status("files") == InstigatorStatus.DECLARED_IN_CODE


def test_a_sensor_that_was_stopped_before_is_not_started(fabric: Fabric) -> None:
    fabric.switch("files", InstigatorStatus.STOPPED)
    fabric.fill()
    found = fabric.tick(pause_sensors=["files", "idle"])
    assert "sensors" not in found
    fabric.empty()
    fabric.tick(pause_sensors=["files", "idle"])
    assert fabric.status("files") == InstigatorStatus.STOPPED
    assert fabric.status("idle") is None


def test_a_sensor_that_somebody_started_keeps_running(fabric: Fabric) -> None:
    fabric.switch("files", InstigatorStatus.RUNNING, started_at=100.0)
    fabric.fill()
    fabric.tick(pause_sensors=["files"])
    fabric.switch("files", InstigatorStatus.RUNNING, started_at=200.0)
    fabric.tick(pause_sensors=["files"])
    assert fabric.status("files") == InstigatorStatus.RUNNING, "nor is it stopped again"
    fabric.empty()
    fabric.tick(pause_sensors=["files"])
    state = fabric.sensor_state("files")
    assert state is not None
    assert state.sensor_instigator_data is not None
    assert state.sensor_instigator_data.last_sensor_start_timestamp == 200.0


def test_a_sensor_that_somebody_started_and_stopped_stays_stopped(fabric: Fabric) -> None:
    fabric.switch("files", InstigatorStatus.RUNNING, started_at=100.0)
    fabric.fill()
    fabric.tick(pause_sensors=["files"])
    fabric.switch("files", InstigatorStatus.STOPPED, started_at=200.0)
    fabric.empty()
    found = fabric.tick(pause_sensors=["files"])
    assert fabric.status("files") == InstigatorStatus.STOPPED
    assert "somebody started and stopped it" in found["notes"][0]


def test_a_sensor_that_does_not_exist_is_said_to(fabric: Fabric) -> None:
    fabric.fill()
    found = fabric.tick(pause_sensors=["fiels"])
    assert "there is none of that name" in found["notes"][0]


def test_the_hook_is_called_once_a_change_and_again_if_it_raised(fabric: Fabric) -> None:
    told: list[tuple[bool, int]] = []
    broken = True

    def hook(context: dg.SensorEvaluationContext, change: BackpressureChange) -> None:
        told.append((change.on, change.stats.pending))
        if broken:
            raise RuntimeError("no connection")

    fabric.set_limit("ingest", 5)
    arguments = {"on_change": hook, "pool_limits": {"ingest": 1}}
    fabric.fill()
    with pytest.raises(Exception, match="no connection"):
        fabric.tick(**arguments)
    broken = False
    fabric.tick(**arguments)
    fabric.tick(**arguments)
    fabric.empty()
    broken = True
    with pytest.raises(Exception, match="no connection"):
        fabric.tick(**arguments)
    broken = False
    fabric.tick(**arguments)
    fabric.tick(**arguments)
    assert told == [(True, 10), (True, 10), (False, 0), (False, 0)]
    assert fabric.limit("ingest") == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"queue": "1st", "pool_limits": {"a": 1}}, "queue: must be the key"),
        ({"queue": "landing"}, "give at least one of them"),
        ({"queue": "landing", "pool_limits": {"a": -1}}, r"pool_limits\['a'\]: must be a whole number, 0 or more"),
        ({"queue": "landing", "pool_limits": {"a": True}}, "pool_limits"),
        ({"queue": "landing", "pool_limits": ["a"]}, "pool_limits: must map pools to limits"),
        ({"queue": "landing", "pause_sensors": "files"}, "pause_sensors: must be a list"),
        ({"queue": "landing", "pause_sensors": [files]}, "use sensor.name"),
        ({"queue": "landing", "pause_sensors": ["landing_backpressure_sensor"]}, "this sensor itself"),
        ({"queue": "landing", "on_change": "hook"}, "on_change: must be a function"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=said):
        build_backpressure_sensor(**arguments)
