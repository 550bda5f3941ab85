"""Side effects whose outcome is recorded once, and answered from the record ever after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lease_core import limits
from lease_core.deterministic import records
from lease_core.deterministic.errors import RecordConflict, RecordedFailure
from lease_core.deterministic.records import EFFECT, FAILED, SUCCEEDED, Failure, Record
from lease_core.deterministic.state import Fence, StateStore, encoded
from lease_core.errors import InvalidInput, LeaseError
from lease_core.model import Lease

T = TypeVar("T")

Failures = bool | type[Exception] | tuple[type[Exception], ...]
LeaseEffectId = Callable[[str, Lease], str]

_MAX_MESSAGE = 4_096


def effect_id(change_id: str, sequence_number: int, version: int | None = None) -> str:
    """The default name of an effect: ``{change_id}/seq/{sequence_number}``, with ``/v{version}`` before it if given.

    It must be the same at every replay and for nothing else: made of what the work is, never of who does it or when.
    """
    records.check_id("change_id", change_id)
    if isinstance(sequence_number, bool) or not isinstance(sequence_number, int) or sequence_number < 0:
        raise InvalidInput("sequence_number", f"must be a whole number, 0 or more (got {sequence_number!r})")
    return f"{change_id}/seq/{sequence_number}" if version is None else f"{change_id}/v{version}/seq/{sequence_number}"


class EffectStore:
    """Runs side effects under stable ids and keeps their outcomes.

    Promised: at most one outcome is ever recorded under an id, and every caller gets that one, also those that ran
    the effect at the same time and came second. Not promised: that the effect itself runs only once. A process that
    is killed after the effect and before the record leaves no outcome, and the next one runs it again; so pass the id
    on to whatever is called as its idempotency key, or write effect and record in one transaction (``within``).
    """

    def __init__(self, store: StateStore) -> None:
        self.store = store

    def run_once(
        self,
        effect_id: str,
        fn: Callable[[], T],
        *,
        lease: Lease | None = None,
        about: str | None = None,
        formerly: str | None = None,
        record_failures: Failures = False,
    ) -> T:
        """The recorded outcome of ``effect_id``; if there is none, that of ``fn()``, which is recorded.

        The outcome is a JSON value and comes back as JSON would have it, the first time too. An exception is passed on
        and nothing is recorded, unless ``record_failures`` names its class (or is true); then replays raise
        ``RecordedFailure``. With ``lease`` the effect is neither begun nor recorded if the lease has ended or was taken
        over: ``StaleFence``, a ``LeaseLost``. ``about`` says what the effect is applied to; the same id about something
        else raises ``RecordConflict``. ``formerly`` is the id under which older workers record the same effect: both
        ids then get the same outcome.
        """
        records.check_id("effect_id", effect_id)
        records.check_renaming("effect_id", effect_id, formerly)
        if about is not None:
            limits.text("about", about)
        found = self._find(effect_id, formerly, about)
        if found is None and lease is not None:
            self.store.claim(fence_of(lease, effect_id))
            self._check(lease)
            # the holder before this one may have recorded at the last moment; from here on it cannot
            found = self._find(effect_id, formerly, about)
        if found is None:
            found = self._run(effect_id, fn, lease, about, formerly, record_failures)
        outcome: T = _outcome(found)
        return outcome

    def recorded(self, effect_id: str) -> Record | None:
        """The record of an effect, or None: for looking, without running anything."""
        return self._find(records.check_id("effect_id", effect_id), None, None)

    def forget(self, effect_id: str) -> bool:
        """Remove an effect's record, so that it would run again. Gives whether there was one."""
        return self.recorded(effect_id) is not None and self.store.remove(effect_id)

    def leased(self, lease: Lease, name_effect: LeaseEffectId | None = None) -> LeaseEffects:
        """The effects of one leased item: what ``lease.effects`` is, on this store."""
        return LeaseEffects(self, lease, name_effect or lease_effect_id)

    def within(self, connection: Any) -> EffectStore:
        """This store inside of the caller's transaction, where it is a SQL database: the record is committed with
        what the effect writes there, or neither is. Then the effect has happened exactly once."""
        joins = getattr(self.store, "within", None)
        if joins is None:
            raise InvalidInput("connection", f"{self.store!r} has no transactions; use a sqlite or postgresql store")
        return EffectStore(joins(connection))

    def _find(self, effect_id: str, formerly: str | None, about: str | None) -> Record | None:
        found = records.find(self.store, EFFECT, effect_id, formerly)
        if found is not None and about is not None and found.about not in (None, about):
            raise RecordConflict(
                f"effect {effect_id!r} is recorded about {found.about!r}, and asked for about {about!r}: "
                "an id must stand for one thing only; make it of more than it is made of now"
            )
        return found

    def _check(self, lease: Lease | None) -> None:
        """Ask the queue, where it is known. A store of its own may not have heard of the next holder yet."""
        if lease is not None and lease.origin is not None and not self.store.checks_tokens:
            lease.origin.check(lease.token)

    def _run(
        self,
        effect_id: str,
        fn: Callable[[], Any],
        lease: Lease | None,
        about: str | None,
        formerly: str | None,
        record_failures: Failures,
    ) -> Record:
        number = None if lease is None else lease.token.fence
        first = formerly or effect_id  # workers that know only the former id record there: that is where it is decided
        try:
            value = fn()
        except Exception as error:
            if not _is_outcome(error, record_failures):
                raise
            failure = Failure(type(error).__name__, str(error)[:_MAX_MESSAGE])
            ours = records.new(EFFECT, first, status=FAILED, error=failure, about=about, fence=number)
            kept = self._record(ours, lease, effect_id)
            if kept.recorded_by == ours.recorded_by:
                raise
            return kept
        if value is not None:
            encoded(f"outcome of effect {effect_id!r}", value)
        ours = records.new(EFFECT, first, status=SUCCEEDED, value=value, about=about, fence=number)
        return self._record(ours, lease, effect_id)

    def _record(self, ours: Record, lease: Lease | None, effect_id: str) -> Record:
        """Record an outcome unless there is one. Gives the one that is there, under the id that was asked for."""
        fence = None if lease is None else fence_of(lease, effect_id)
        self._check(lease)
        there = self.store.add(ours.id, records.document(ours), fence=fence).value
        kept = records.read(EFFECT, ours.id, there)
        if self.store.joined and kept.recorded_by != ours.recorded_by:
            raise RecordConflict(
                f"effect {effect_id!r} was recorded by another transaction while this one ran it too: roll back, and "
                "call again to get the recorded outcome"
            )
        return kept if ours.id == effect_id else records.copy(self.store, kept, effect_id)


class LeaseEffects:
    """``run_once`` for one leased item: ids are made of a name and the item, and the lease's fence is checked."""

    def __init__(self, effects: EffectStore, lease: Lease, name_effect: LeaseEffectId) -> None:
        self._effects = effects
        self._lease = lease
        self._name_effect = name_effect

    def id(self, name: str) -> str:
        """The effect's id, the same at every attempt on this item: good as an idempotency key elsewhere."""
        records.check_id("name", name)
        return self._name_effect(name, self._lease)

    def run_once(self, name: str, fn: Callable[[], T], *, record_failures: Failures = False) -> T:
        """Run ``fn`` and record its outcome as this item's ``name``; answer from the record if there is one.

        See ``EffectStore.run_once``. Raises ``StaleFence`` instead of beginning or recording an effect once the lease
        has ended or was taken over.
        """
        return self._effects.run_once(self.id(name), fn, lease=self._lease, record_failures=record_failures)


def lease_effect_id(name: str, lease: Lease) -> str:
    """``{queue_id}/{name}/seq/{sequence_id}``: the item's number tells it from others of its queue only."""
    if lease.origin is None:
        raise InvalidInput(
            "lease",
            "did not come from a queue that this process has open, so its item has no name of its own: give one",
        )
    return effect_id(f"{lease.origin.queue_id}/{name}", lease.token.sequence_id)


def fence_of(lease: Lease, effect_id: str) -> Fence:
    """The lease's fence. Numbers can be compared for an item of a queue; where the queue is not known, for the id."""
    if not isinstance(lease, Lease):
        raise InvalidInput("lease", f"must be a Lease, not {type(lease).__name__}")
    if lease.origin is None:
        return Fence(f"effect/{effect_id}", lease.token)
    return Fence(f"item/{lease.origin.queue_id}/{lease.token.sequence_id}", lease.token)


def _is_outcome(error: Exception, record_failures: Failures) -> bool:
    """Whether an exception is an answer. Losing the lease or the store never is, unless named."""
    if isinstance(record_failures, bool):
        return record_failures and not isinstance(error, LeaseError)
    return isinstance(error, record_failures)


def _outcome(record: Record) -> Any:
    if record.status == FAILED:
        failure = record.error or Failure("Exception")
        raise RecordedFailure(record.id, failure.kind, failure.message)
    return record.value
