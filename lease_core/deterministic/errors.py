"""What deterministic capture raises on purpose, besides the errors of ``lease_core.errors``.

LeaseError
├── LeaseLost
│   └── StaleFence              a lease that has ended tried to record; nothing was written
└── DeterminismError
    ├── WrongKind               the id is in use for something else: a version, an effect
    ├── VersionOutsideWindow    the pinned version is not one that this code can run
    ├── RecordConflict          two records that should agree do not
    ├── RecordUnreadable        what is stored under the id is not a record
    └── RecordedFailure         the recorded outcome is a failure, and this is it
"""

from __future__ import annotations

from lease_core.errors import LeaseError, LeaseLost


class StaleFence(LeaseLost):
    """A holder whose lease has ended, or was taken over, tried to record. Nothing was written: stop."""

    code = "resourcelease.stale_fence"


class DeterminismError(LeaseError):
    code = "resourcelease.determinism"


class WrongKind(DeterminismError):
    code = "resourcelease.wrong_kind"


class VersionOutsideWindow(DeterminismError):
    """``change_id`` is pinned to ``version``, which is not among those that the caller supports."""

    code = "resourcelease.version_outside_window"

    def __init__(self, change_id: str, version: int, supported: str) -> None:
        super().__init__(
            f"change {change_id!r} is pinned to version {version}, and this code supports {supported}: "
            f"run it with a build that still has version {version}, or begin a new change id"
        )
        self.change_id = change_id
        self.version = version
        self.supported = supported

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.change_id, self.version, self.supported)


class RecordConflict(DeterminismError):
    code = "resourcelease.record_conflict"


class RecordUnreadable(DeterminismError):
    code = "resourcelease.record_unreadable"


class RecordedFailure(DeterminismError):
    """The effect failed when it ran, and that was recorded as its outcome. ``kind`` is the exception's class name."""

    code = "resourcelease.recorded_failure"

    def __init__(self, effect_id: str, kind: str, message: str) -> None:
        super().__init__(f"effect {effect_id!r} failed when it ran, and that is its outcome: {kind}: {message}")
        self.effect_id = effect_id
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.effect_id, self.kind, self.message)
