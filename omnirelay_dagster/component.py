"""A lease queue from YAML: the same as ``lease_queue_definitions``, declared rather than coded."""

from __future__ import annotations

from typing import Any, Literal

import dagster as dg
from pydantic import Field

from omnirelay_dagster.checks import DEFAULT_MAX_LAG
from omnirelay_dagster.queue_definitions import lease_queue_definitions
from omnirelay_dagster.resource import LeaseQueueResource


class QueueSettings(dg.Model, dg.Resolvable):
    """The queue itself: where it is and the rules it lives by. The fields are those of ``LeaseQueueResource``."""

    url: str = Field(description="sqlite:///path or postgresql://user@host/db")
    namespace: str = Field("resourcelease", description="the queue's name within the database")
    auto_migrate: bool | None = Field(None, description="make or migrate the schema on opening")
    lease_duration: float | None = Field(None, description="seconds a lease lasts without a heartbeat", gt=0)
    heartbeat_interval: float | None = Field(None, description="seconds between heartbeats", gt=0)
    max_attempts: int | None = Field(None, description="leases an item gets before it is dead-lettered", ge=1)
    retry_delay: float | None = Field(None, description="seconds before the first retry; doubles each time", ge=0)
    retry_delay_cap: float | None = Field(None, description="the longest pause before a retry, in seconds", ge=0)
    high_watermark: int | None = Field(None, description="depth at which backpressure begins", ge=1)
    low_watermark: int | None = Field(None, description="depth at which it ends; by default half of the high", ge=0)
    exclusive: Literal["resource", "partition"] | None = Field(None, description="one active lease for each")
    capacity: int | None = Field(None, description="the most items that may wait", ge=1)
    retention: float | None = Field(None, description="seconds that completed items are remembered", ge=0)
    max_body_bytes: int | None = Field(None, description="the largest body", ge=0)
    max_attributes: int | None = Field(None, description="the most attributes", ge=0)
    max_attribute_bytes: int | None = Field(None, description="the most bytes of attribute values", ge=0)
    max_id_bytes: int | None = Field(None, description="the longest id", ge=1)
    max_batch: int | None = Field(None, description="the most items in one call", ge=1)
    max_result_bytes: int | None = Field(None, description="the largest result", ge=2)
    max_error_bytes: int | None = Field(None, description="how much of an error is kept", ge=64)
    durability: Literal["full", "relaxed"] | None = Field(None, description="what a commit waits for")
    store_timeout: float | None = Field(None, description="seconds to wait for a busy or absent database", gt=0)

    def to_resource(self) -> LeaseQueueResource:
        return LeaseQueueResource(**{name: getattr(self, name) for name in self.model_fields_set})


class LeaseQueueScaffolder(dg.Scaffolder[Any]):
    """Writes a ``defs.yaml`` that loads as it is: a queue in a SQLite file, named after its folder."""

    def scaffold(self, request: dg.ScaffoldRequest[Any]) -> None:
        name = request.target_path.stem if request.append else request.target_path.name
        queue = "".join(character if character.isalnum() else "_" for character in name)
        queue = queue if queue.isidentifier() else f"queue_{queue}"
        dg.scaffold_component(
            request, {"queue": queue, "resource": {"url": f"sqlite:///{queue}.db", "namespace": queue}}
        )


@dg.scaffold_with(LeaseQueueScaffolder)
class LeaseQueueComponent(dg.Component, dg.Model, dg.Resolvable):
    """A lease queue: its asset, checks, sensors and operator jobs and, if asked for, the queue itself."""

    queue: str = Field(description="the key of the queue's resource", examples=["landing"])
    asset: str | list[str] | None = Field(
        None, description="the asset, or assets, that work on the queue; runs are launched while there is work"
    )
    resource: QueueSettings | None = Field(
        None, description="the queue itself; leave it out if the project defines the LeaseQueueResource elsewhere"
    )
    asset_key: str | None = Field(None, description="the key of the queue's own asset; by default queues/<queue>")
    group_name: str = Field("queues", description="the group of the queue's own asset")
    max_lag: int = Field(DEFAULT_MAX_LAG, description="events that a reader of the log may be behind", ge=0)
    observe_every: int = Field(30, description="seconds between observations", ge=1)
    sensors_on: bool = Field(True, description="whether the sensors are on from the start")
    work: dict[str, Any] | None = Field(None, description="further arguments of build_work_sensor")
    run_status: dict[str, Any] | None = Field(None, description="further arguments of build_run_status_sensors")
    backpressure: dict[str, Any] | None = Field(
        None, description="arguments of build_backpressure_sensor; without them there is no such sensor"
    )
    replication: dict[str, Any] | None = Field(
        None, description="arguments of build_replication_sensor; without them there is no such sensor"
    )
    relay: dict[str, Any] | None = Field(
        None,
        description="arguments of build_relay_sensor, such as config; without them there is no such sensor",
        examples=[{"config": "omnirelay.toml"}],
    )

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        return lease_queue_definitions(
            queue=self.queue,
            asset=self.asset,
            resource=None if self.resource is None else self.resource.to_resource(),
            asset_key=None if self.asset_key is None else dg.AssetKey.from_user_string(self.asset_key),
            group_name=self.group_name,
            max_lag=self.max_lag,
            observe_every=self.observe_every,
            default_status=None if self.sensors_on else dg.DefaultSensorStatus.STOPPED,
            work=self.work,
            run_status=self.run_status,
            backpressure=self.backpressure,
            replication=self.replication,
            relay=self.relay,
        )
