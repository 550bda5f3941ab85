"""Keeping leases alive while work goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from lease_core.config import QueueConfig
from lease_core.errors import LeaseError, LeaseLost
from lease_core.model import AckResult, Lease, LeaseToken

logger = logging.getLogger(__name__)

_TRUST = 0.9
"""The part of a lease's duration for which it is trusted after the last confirmed heartbeat was *sent*."""


class Heartbeats(Protocol):
    """What a hold needs of a queue."""

    config: QueueConfig

    def heartbeat(self, tokens: Sequence[LeaseToken], *, duration: float | None = None) -> AckResult: ...


class AskedAt:
    """When this process asked for its latest leases, by its monotonic clock: a lease is never older than that.

    Threads share it, without a lock that a forked child could inherit locked.
    """

    def __init__(self, keep: int = 4_096) -> None:
        self._keep = keep
        self._moments: dict[str, float] = {}

    def remember(self, lease_id: str, moment: float) -> None:
        self._moments[lease_id] = moment
        if len(self._moments) > 2 * self._keep:
            for oldest in list(self._moments)[: -self._keep]:  # a copy, for other threads add to it meanwhile
                self._moments.pop(oldest, None)

    def of(self, lease_id: str) -> float:
        """The moment, or minus infinity for a lease that this queue object did not ask for."""
        return self._moments.get(lease_id, -math.inf)


class Hold:
    """Heartbeats for some leases, sent from a thread for as long as the ``with`` block runs.

    Go by ``lost``: it names the leases that can no longer be trusted, because the queue refused their heartbeat or
    because no heartbeat got through while there was time. The second is judged by this process's monotonic clock
    alone, before the lease really ends, so that a holder which is cut off stops before another one starts.
    ``check()`` raises ``LeaseLost`` instead; call it before anything that others will see.

    Leases that are completed, failed or released through the same queue object in the meantime are left out.
    """

    def __init__(
        self,
        queue: Heartbeats,
        leases: Lease | Sequence[Lease],
        on_lost: Callable[[tuple[Lease, ...]], None] | None,
        asked_at: AskedAt,
    ) -> None:
        self._queue = queue
        given = [leases] if isinstance(leases, Lease) else list(leases)
        self._held = {lease.token: lease for lease in given}
        self._lost: dict[LeaseToken, Lease] = {}
        self._ending: set[LeaseToken] = set()
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._duration = min(((each.expires_at - each.granted_at).total_seconds() for each in given), default=0.0)
        asked = min((asked_at.of(each.token.lease_id) for each in given), default=0.0)
        self._trusted_until = asked + self._duration * _TRUST
        self._threads: list[threading.Thread] = []
        self.last_error: LeaseError | None = None

    def __enter__(self) -> Hold:
        if self._held:
            if time.monotonic() > self._trusted_until - self._duration / 2:
                self._beat()  # not much is left, or it is not known how much: find out before the block runs
            # who talks to the database may be kept waiting by it, so another one watches the clock
            for name, duty in (("lease-heartbeat", self._keep_beating), ("lease-watch", self._watch)):
                self._threads.append(threading.Thread(target=duty, name=name, daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    @property
    def lost(self) -> tuple[Lease, ...]:
        """The leases that must not be acted on any more. Empty, and so false, while all is well."""
        if self._threads and time.monotonic() > self._trusted_until:
            self._give_up(list(self._held))
        with self._lock:
            return tuple(self._lost.values())

    @property
    def held(self) -> tuple[Lease, ...]:
        """The leases that can still be trusted."""
        lost = {lease.token for lease in self.lost}
        with self._lock:
            return tuple(lease for token, lease in self._held.items() if token not in lost)

    def check(self) -> None:
        """Raise ``LeaseLost`` if any lease was lost."""
        lost = self.lost
        if lost:
            names = ", ".join(str(lease.token.sequence_id) for lease in lost[:5])
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            why = f" ({self.last_error})" if self.last_error else ""
            raise LeaseLost(f"the lease on item {names}{more} is lost{why}: stop, and publish nothing")

    def forget(self, leases: Lease | Sequence[Lease]) -> None:
        """Stop heartbeats for leases that are done with."""
        with self._lock:
            for lease in [leases] if isinstance(leases, Lease) else leases:
                self._held.pop(lease.token, None)

    @contextmanager
    def ending(self, tokens: Sequence[LeaseToken]) -> Iterator[list[LeaseToken]]:
        """While tokens are being completed, failed or released: a heartbeat that is refused because of that says
        nothing. The block adds to the list it is given what was accepted; those are done with."""
        accepted: list[LeaseToken] = []
        with self._lock:
            self._ending.update(tokens)
        try:
            yield accepted
        finally:
            with self._lock:
                for token in accepted:
                    self._held.pop(token, None)
                self._ending.difference_update(tokens)

    def _keep_beating(self) -> None:
        pause = min(self._queue.config.beat_every, self._duration / 3)
        while not self._stop.wait(pause):
            self._beat()

    def _watch(self) -> None:
        while not self._stop.wait(max(0.0, self._trusted_until - time.monotonic()) + 0.001):
            if time.monotonic() > self._trusted_until:
                self._give_up(list(self._held))
                return

    def _beat(self) -> None:
        with self._lock:
            tokens = list(self._held)
        if not tokens:
            return
        sent = time.monotonic()
        most = self._queue.config.max_batch
        accepted = False
        for at in range(0, len(tokens), most):
            try:
                result = self._queue.heartbeat(tokens[at : at + most], duration=self._duration)
            except LeaseError as error:
                self.last_error = error  # the next beat may get through; trust runs out by itself if none does
                return
            accepted = accepted or bool(result.accepted)
            if result.refused:
                with self._lock:
                    ending = set(self._ending)
                self._give_up([refusal.token for refusal in result.refused if refusal.token not in ending])
        if accepted:
            self._trusted_until = sent + self._duration * _TRUST

    def _give_up(self, tokens: Sequence[LeaseToken]) -> None:
        with self._lock:
            lost = {token: self._held.pop(token) for token in tokens if token in self._held}
            self._lost.update(lost)
        if lost and self._on_lost is not None:
            try:
                self._on_lost(tuple(lost.values()))
            except Exception:  # the other leases are still to be kept
                logger.exception("on_lost failed for %d leases, which are lost all the same", len(lost))
