"""The queue as a Dagster resource."""

from __future__ import annotations

import threading
from typing import Any

import dagster as dg
from dagster._config.field_utils import IntEnvVar
from pydantic import Field, PrivateAttr

from lease_core import LeaseError, LeaseQueue, LeaseToken, QueueConfig
from lease_core.store import parse


class LeaseQueueResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A lease queue for assets, ops, sensors and schedules.

    ``url`` and ``namespace`` say which queue; every other field is one of ``QueueConfig``'s, and left out means its
    default. All of them can be environment variables (``dg.EnvVar("FABRIC_URL")``). Nothing is opened until the queue
    is first used. When a step ends, whatever it still holds is handed back.

    It also works in plain Python: ``LeaseQueueResource(url="sqlite:///fabric.db").get_queue()``.
    """

    url: str = Field(description="sqlite:///path or postgresql://user@host/db")
    namespace: str = Field("resourcelease", description="the queue's name within the database")
    auto_migrate: bool | None = Field(
        None, description="make or migrate the schema on opening; by default on SQLite only"
    )
    lease_duration: float | None = Field(None, description="seconds a lease lasts without a heartbeat")
    heartbeat_interval: float | None = Field(None, description="seconds between heartbeats")
    max_attempts: int | None = Field(None, description="leases an item gets before it is dead-lettered")
    retry_delay: float | None = Field(None, description="seconds before the first retry; doubles each time")
    retry_delay_cap: float | None = Field(None, description="the longest pause before a retry, in seconds")
    high_watermark: int | None = Field(None, description="depth at which backpressure begins")
    low_watermark: int | None = Field(None, description="depth at which it ends; by default half of the high mark")
    exclusive: str | None = Field(None, description="'resource' or 'partition': one active lease for each")
    capacity: int | None = Field(None, description="the most items that may wait")
    retention: float | None = Field(None, description="seconds that completed items are remembered")
    max_body_bytes: int | None = Field(None, description="the largest body")
    max_attributes: int | None = Field(None, description="the most attributes")
    max_attribute_bytes: int | None = Field(None, description="the most bytes of attribute values")
    max_id_bytes: int | None = Field(None, description="the longest id")
    max_batch: int | None = Field(None, description="the most items in one call")
    max_result_bytes: int | None = Field(None, description="the largest result")
    max_error_bytes: int | None = Field(None, description="how much of an error is kept")
    durability: str | None = Field(None, description="'full' or 'relaxed'")
    store_timeout: float | None = Field(None, description="seconds to wait for a database that is busy or away")

    _queue: LeaseQueue | None = PrivateAttr(None)
    _held: set[LeaseToken] = PrivateAttr(default_factory=set)
    _lock: Any = PrivateAttr(default_factory=threading.Lock)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._refuse_nonsense()

    def _refuse_nonsense(self) -> None:
        """Raise if this could never open a queue: a wrong url, marks or durations that make no sense.

        Nothing is opened. Values that come from the environment are only known when the queue is used, and pass.
        """
        given = [getattr(self, name) for name in type(self).model_fields]
        try:
            if not isinstance(self.url, dg.EnvVar):
                parse(self.url)
            if not any(isinstance(value, dg.EnvVar | IntEnvVar) for value in given):
                self.queue_config()
        except LeaseError as error:
            where = f"LeaseQueueResource(namespace={self.namespace!r})"
            raise dg.DagsterInvalidDefinitionError(f"{where}: {error}") from error

    def queue_config(self) -> QueueConfig:
        """The queue's settings: what was set here, and defaults for the rest."""
        given = {name: getattr(self, name) for name in QueueConfig.model_fields}
        return QueueConfig(**{name: value for name, value in given.items() if value is not None})

    def get_queue(self) -> LeaseQueue:
        """The queue, opened the first time it is asked for."""
        with self._lock:
            if self._queue is None:
                self._queue = LeaseQueue.open(
                    self.url, self.namespace, self.queue_config(), auto_migrate=self.auto_migrate
                )
            return self._queue

    def keep_track(self, tokens: list[LeaseToken]) -> None:
        """Note leases that are to be handed back should the step end without a word about them."""
        self._held.update(tokens)

    def lose_track(self, tokens: list[LeaseToken]) -> None:
        self._held.difference_update(tokens)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Hand back what is still held, and close."""
        with self._lock:
            queue, self._queue = self._queue, None
        if queue is None:
            return
        try:
            held, self._held = list(self._held), set()
            if held:
                queue.release(held)
        except LeaseError as error:
            if context.log is not None:
                context.log.warning(f"could not hand back {len(held)} leases, they will expire: {error}")
        finally:
            queue.close()
