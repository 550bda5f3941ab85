"""The rules a queue lives by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lease_core.errors import InvalidConfig


class QueueConfig(BaseModel):
    """Everything about a queue that can be chosen, with defaults that suit most. Durations are in seconds.

    The watermarks, the capacity and ``exclusive`` belong to the namespace rather than to this process: whoever
    opens the queue with one of them set sets it for everybody, and who leaves it out goes by what is set already.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lease_duration: float = Field(30.0, gt=0, le=30 * 86_400)
    heartbeat_interval: float | None = Field(None, gt=0)
    max_attempts: int = Field(5, ge=1, le=1_000_000)
    retry_delay: float = Field(1.0, ge=0, le=366 * 86_400)
    retry_delay_cap: float = Field(300.0, ge=0, le=366 * 86_400)
    high_watermark: int | None = Field(None, ge=1, le=2**52)
    low_watermark: int | None = Field(None, ge=0, le=2**52)
    exclusive: Literal["resource", "partition"] | None = None
    capacity: int | None = Field(None, ge=1, le=2**52)
    retention: float = Field(86_400.0, ge=0, le=100 * 366 * 86_400)
    max_body_bytes: int = Field(1_048_576, ge=0)
    max_attributes: int = Field(64, ge=0)
    max_attribute_bytes: int = Field(65_536, ge=0)
    max_id_bytes: int = Field(1_024, ge=1)
    max_batch: int = Field(10_000, ge=1, le=100_000)
    max_result_bytes: int = Field(1_048_576, ge=2)
    max_error_bytes: int = Field(16_384, ge=64)
    durability: Literal["full", "relaxed"] = "full"
    store_timeout: float = Field(15.0, gt=0, le=3_600)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            problem = first["msg"].removeprefix("Value error, ")
            if not field:
                field, _, problem = problem.partition(": ")
            raise InvalidConfig(field, f"{problem} (got {values.get(field)!r})") from None

    @model_validator(mode="after")
    def _agree(self) -> QueueConfig:
        if self.heartbeat_interval is not None and self.heartbeat_interval > self.lease_duration / 2:
            raise ValueError(
                f"heartbeat_interval: must be at most half of lease_duration ({self.lease_duration}), "
                "or one late heartbeat loses the lease"
            )
        if self.retry_delay > self.retry_delay_cap:
            raise ValueError(f"retry_delay: must not be above retry_delay_cap ({self.retry_delay_cap})")
        if self.low_watermark is not None:
            if self.high_watermark is None:
                raise ValueError("low_watermark: needs a high_watermark to go with it")
            if self.low_watermark >= self.high_watermark:
                raise ValueError(f"low_watermark: must be below high_watermark ({self.high_watermark})")
        if self.capacity is not None and self.high_watermark is not None and self.high_watermark > self.capacity:
            raise ValueError(f"high_watermark: must not be above capacity ({self.capacity}), it would never be met")
        return self

    @property
    def beat_every(self) -> float:
        """Seconds between heartbeats: what was asked for, or a third of the lease."""
        return self.heartbeat_interval or self.lease_duration / 3

    @property
    def low_mark(self) -> int | None:
        """The low mark in force: what was asked for, or half of the high mark."""
        if self.high_watermark is None:
            return None
        return self.high_watermark // 2 if self.low_watermark is None else self.low_watermark
