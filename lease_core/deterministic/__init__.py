"""Deterministic capture: versions pinned once, side effects recorded once, events applied once.

Useful with a queue (``lease.effects``) and without. Start at ``StateStore.open``.
"""

from lease_core.deterministic.effects import EffectStore, LeaseEffects, effect_id
from lease_core.deterministic.errors import (
    DeterminismError,
    RecordConflict,
    RecordedFailure,
    StaleFence,
    VersionOutsideWindow,
    WrongKind,
)
from lease_core.deterministic.sink import DeterministicSink, TransactionalSink
from lease_core.deterministic.state import Fence, StateStore
from lease_core.deterministic.versions import VersionGate

__all__ = [
    "DeterminismError",
    "DeterministicSink",
    "EffectStore",
    "Fence",
    "LeaseEffects",
    "RecordConflict",
    "RecordedFailure",
    "StaleFence",
    "StateStore",
    "TransactionalSink",
    "VersionGate",
    "VersionOutsideWindow",
    "WrongKind",
    "effect_id",
]
