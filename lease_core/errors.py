"""Every error this package raises on purpose.

    LeaseError
    ├── InvalidInput            an argument is wrong; nothing was written      (also a ValueError)
    │   └── InvalidConfig       a QueueConfig field, or fields that contradict each other
    ├── ConfigConflict          the namespace already lives under other rules
    ├── BackpressureActive      the queue is above its high mark
    │   └── QueueFull           the queue is at its capacity
    ├── LeaseRefused            raise_if_refused() met a stale, expired or unknown token
    ├── LeaseLost               a held lease can no longer be trusted
    ├── EventsPruned            the log no longer reaches back that far
    ├── QueueClosed             the queue object was closed, or cannot follow a fork
    ├── DeterminismError        what is recorded does not fit: see lease_core.deterministic.errors
    ├── QueueSealed             this copy of the queue takes no writes: it follows another, or another took over
    └── StoreError              the database
        ├── StoreUnavailable    it cannot be reached, or went away
        ├── StoreBusy           another writer held the lock for too long
        ├── StoreReadOnly       it takes no writes
        ├── StoreFull           no space is left
        └── SchemaError         its tables are missing, or not of the version this code knows
            ├── SchemaMissing
            ├── SchemaOutdated
            └── SchemaTooNew

Each class has a stable ``code`` that logs, metrics and wire formats may rely on; messages say what to do next and may
change. Whatever is raised, the operation either happened as a whole or left no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class LeaseError(Exception):
    """Root of the tree: ``except LeaseError`` catches everything below."""

    code: ClassVar[str] = "resourcelease.error"


class InvalidInput(LeaseError, ValueError):
    """An argument cannot be accepted. ``field`` names it; nothing was written."""

    code = "resourcelease.invalid_input"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)


class InvalidConfig(InvalidInput):
    code = "resourcelease.invalid_config"


class ConfigConflict(LeaseError):
    code = "resourcelease.config_conflict"


class BackpressureActive(LeaseError):
    """The queue takes no more work until its depth falls to the low mark. Nothing was enqueued."""

    code = "resourcelease.backpressure_active"


class QueueFull(BackpressureActive):
    """The items would not fit under ``capacity``. Nothing was enqueued."""

    code = "resourcelease.queue_full"


class LeaseRefused(LeaseError):
    """At least one token was refused. ``refused`` has a ``Refusal`` for each, with its code and reason."""

    code = "resourcelease.lease_refused"

    def __init__(self, refused: Sequence[Any]) -> None:
        first = refused[0]
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        super().__init__(f"item {first.token.sequence_id}: {first.reason}{more}")
        self.refused = tuple(refused)

    def __reduce__(self) -> tuple[type, tuple[tuple[Any, ...]]]:
        return type(self), (self.refused,)


class LeaseLost(LeaseError):
    """The lease ran out, was taken over, or could not be renewed in time: stop, and publish nothing."""

    code = "resourcelease.lease_lost"


class EventsPruned(LeaseError):
    """The events asked for were pruned. ``oldest`` is the first sequence number still in the log."""

    code = "resourcelease.events_pruned"

    def __init__(self, after: int, oldest: int) -> None:
        super().__init__(
            f"events after {after} were asked for, but the log begins at {oldest}: "
            f"read the missing ones from a copy of the log, or start again with after={oldest - 1}"
        )
        self.after = after
        self.oldest = oldest

    def __reduce__(self) -> tuple[type, tuple[int, int]]:
        return type(self), (self.after, self.oldest)


class QueueClosed(LeaseError):
    code = "resourcelease.queue_closed"


class QueueSealed(LeaseError):
    """This copy of the queue takes no writes. Nothing was written; go on with the copy that is primary."""

    code = "resourcelease.queue_sealed"


class StoreError(LeaseError):
    code = "resourcelease.store_error"


class StoreUnavailable(StoreError):
    """The database cannot be reached. Repeating the call is safe: it happened as a whole or not at all.

    One case needs a ``request_id`` to be safe: an enqueue whose commit got no answer, when the database did not
    come back in time to ask it what became of that commit. The message says so when that happens.
    """

    code = "resourcelease.store_unavailable"


class StoreBusy(StoreError):
    code = "resourcelease.store_busy"


class StoreReadOnly(StoreError):
    code = "resourcelease.store_read_only"


class StoreFull(StoreError):
    code = "resourcelease.store_full"


class SchemaError(StoreError):
    code = "resourcelease.schema"


class SchemaMissing(SchemaError):
    code = "resourcelease.schema_missing"


class SchemaOutdated(SchemaError):
    code = "resourcelease.schema_outdated"


class SchemaTooNew(SchemaError):
    code = "resourcelease.schema_too_new"


def describe(error: BaseException | str, max_bytes: int = 16_384) -> str:
    """An error as the queue keeps it: ``Type: message`` on the first line, then a stack trimmed to fit.

    The innermost frames tell most, so the stack is cut from the top.
    """
    if isinstance(error, str):
        return _fit(error, max_bytes)
    import traceback

    summary = "".join(traceback.format_exception_only(error)).strip()
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    if not frames:
        return _fit(summary, max_bytes)
    head = _fit(summary, max_bytes // 2)
    room = max_bytes - len(head.encode()) - 1
    stack = frames.encode()
    if len(stack) > room:
        stack = b"  ...\n" + stack[-max(room - 6, 0) :]
    return f"{head}\n{stack.decode(errors='ignore')}"


def _fit(text: str, max_bytes: int) -> str:
    raw = text.encode(errors="replace").replace(b"\0", b"?")
    return (raw if len(raw) <= max_bytes else raw[: max_bytes - 3] + b"...").decode(errors="ignore")
