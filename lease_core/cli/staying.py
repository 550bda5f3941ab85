"""Commands that stay until they are told to end: their log, the signals that end them, and waiting for a database."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from lease_core.errors import LeaseError
from lease_core.replication.backoff import Backoff

T = TypeVar("T")
logger = logging.getLogger(__name__)

_WAKE = 0.5
"""Seconds: a signal that comes just before a wait begins does not end it, so no wait is long."""


def log_to_stderr(verbose: bool = False) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of its own parts


def until_signalled() -> threading.Event:
    """What SIGTERM or Ctrl-C sets, from now on."""
    stopping = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stopping.set())
    return stopping


def stay(stopping: threading.Event, every: float, report: Callable[[], None], well: Callable[[], bool]) -> None:
    """Report every so many seconds for as long as all is ``well``, until told to stop."""
    report_at = time.monotonic() + every
    while not stopping.wait(_WAKE) and well():
        if time.monotonic() >= report_at:
            report()
            report_at = time.monotonic() + every


def once_reached(reach: Callable[[], T], stopping: threading.Event, unreached: type[LeaseError]) -> T | None:
    """What ``reach`` gives as soon as it no longer raises ``unreached``; None if told to stop before."""
    failures = 0
    while not stopping.is_set():
        try:
            return reach()
        except unreached as error:
            failures += 1
            pause = Backoff(0.5, 30.0).pause(failures)
            logger.warning("%s; next try in %.1f s", error, pause)
            again = time.monotonic() + pause
            while (left := again - time.monotonic()) > 0 and not stopping.wait(min(left, _WAKE)):
                pass
    return None
