"""A durable, fenced, logged lease queue on SQLite and PostgreSQL. Start at ``LeaseQueue.open``."""

from lease_core.config import QueueConfig
from lease_core.errors import BackpressureActive, LeaseError, LeaseLost
from lease_core.model import (
    AckResult,
    Lease,
    LeaseEvent,
    LeaseToken,
    PendingItem,
    QueueStats,
    Receipt,
    WorkItem,
)
from lease_core.queue import LeaseQueue

__all__ = [
    "AckResult",
    "BackpressureActive",
    "Lease",
    "LeaseError",
    "LeaseEvent",
    "LeaseLost",
    "LeaseQueue",
    "LeaseToken",
    "PendingItem",
    "QueueConfig",
    "QueueStats",
    "Receipt",
    "WorkItem",
]
