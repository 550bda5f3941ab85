"""Follow a queue's log into another database, until SIGTERM or Ctrl-C; or, with --promote, take over from it.

With --seal the first of the two is a primary that was taken for lost and came back: it takes no more writes.
"""

from __future__ import annotations

import argparse
import logging
import threading
from contextlib import ExitStack

from lease_core.cli.rules import rules_arguments, rules_given
from lease_core.cli.sources import SOURCE_HELP, namespace_argument, open_queue, open_source
from lease_core.cli.staying import log_to_stderr, once_reached, stay, until_signalled
from lease_core.errors import InvalidInput, LeaseError, StoreError
from lease_core.queue import LeaseQueue
from lease_core.recovery import Standby, supersede
from lease_core.replication.contract import EventSource
from lease_core.replication.errors import HistoryDiffers

HELP = "follow a queue into another database, and take over from it"
NO_SOURCE = "none"
logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help=f"{SOURCE_HELP}; or {NO_SOURCE}, to promote the standby as it stands")
    parser.add_argument("url", help="the standby's database: sqlite:///path or postgresql://…")
    namespace_argument(parser)
    parser.add_argument("--snapshot", metavar="FILE", help="start from this snapshot")
    parser.add_argument("--interval", type=float, default=0.2, metavar="SECONDS", help="how often to look for more")
    parser.add_argument("--report-every", type=float, default=60.0, metavar="SECONDS", help="how often to log progress")
    parser.add_argument("--promote", action="store_true", help="seal the primary, take in the rest, and take over")
    parser.add_argument("--primary", metavar="URL", help="the primary's database, if the source is a copy of its log")
    parser.add_argument(
        "--primary-is-lost",
        action="store_true",
        help="take over without it: it is gone for good, and so is what the source has not",
    )
    parser.add_argument(
        "--seal", action="store_true", help="seal the source, a primary that came back after the standby took over"
    )
    rules_arguments(parser)
    parser.add_argument("--leases", choices=("keep", "release"), default="keep", help="as of omnirelay rebuild")


def run(options: argparse.Namespace) -> int:
    log_to_stderr()
    with ExitStack() as stack:
        if options.seal:
            return _seal(options, stack)
        if not options.promote:
            if options.source == NO_SOURCE:
                raise InvalidInput("source", f"{NO_SOURCE} is for --promote: there is nothing to follow")
            stopping = until_signalled()
            # one that is started before the primary, or before its own database, waits for it
            reached = once_reached(lambda: _open(options, stack), stopping, StoreError)
            return 0 if reached is None else _follow(reached[1], options.report_every, stopping)
        source, standby = _open_to_promote(options, stack)
        while standby.follow():
            logger.info("at event %s", standby.number)
        primary = None if options.primary_is_lost else _primary(options, source, stack)
        queue = standby.promote(primary, primary_is_lost=options.primary_is_lost, leases=options.leases)
        stats = stack.enter_context(queue).stats()
    print(f"primary now, at event {stats.head}: {stats.pending} pending, {stats.active} active, {stats.dead} dead")
    return 0


def _seal(options: argparse.Namespace, stack: ExitStack) -> int:
    if options.promote or options.source == NO_SOURCE:
        raise InvalidInput("--seal", "name the primary that came back and the queue that took over; it goes alone")
    old = open_queue(options.source, options.namespace, stack)
    sealed = supersede(old, open_queue(options.url, options.namespace, stack))
    print(f"sealed at event {sealed.number}: nobody can write to it any more")
    return 0


def _open_to_promote(options: argparse.Namespace, stack: ExitStack) -> tuple[EventSource | None, Standby]:
    """If the primary is lost, then the standby may be all there is, and is promoted as it stands."""
    if options.source == NO_SOURCE and not options.primary_is_lost and not options.primary:
        raise InvalidInput("source", "is none: say where the --primary is, or --primary-is-lost")
    try:
        return _open(options, stack)
    except StoreError as error:
        if not options.primary_is_lost:
            raise
        logger.warning("the source cannot be reached, so that the standby takes over with what it has: %s", error)
        options.source = NO_SOURCE
        return _open(options, stack)
    except HistoryDiffers as error:
        raise HistoryDiffers(f"{error}; to take over with what the standby has, give {NO_SOURCE!r} as source") from None


def _open(options: argparse.Namespace, stack: ExitStack) -> tuple[EventSource | None, Standby]:
    with ExitStack() as opened:
        given = options.source
        source = None if given == NO_SOURCE else open_source(given, options.namespace, opened)
        standby = opened.enter_context(
            Standby(
                source,
                options.url,
                namespace=options.namespace,
                interval=options.interval,
                snapshot=options.snapshot,
                config=rules_given(options),
            )
        )
        stack.push(opened.pop_all())
    return source, standby


def _primary(options: argparse.Namespace, source: object, stack: ExitStack) -> LeaseQueue:
    if options.primary:
        return open_queue(options.primary, options.namespace, stack)
    if isinstance(source, LeaseQueue):
        return source
    raise InvalidInput("--primary", "the source is a copy: say where the primary is, or that it is lost")


def _follow(standby: Standby, report_every: float, stopping: threading.Event) -> int:
    standby.start()
    stay(stopping, report_every, lambda: _report(standby), lambda: not standby.failed)
    return 1 if standby.failed else 0


def _report(standby: Standby) -> None:
    """Say how far it is. A source that is away, which is what a standby is for, is no reason to end."""
    try:
        logger.info("at event %s, %s behind", standby.number, standby.lag())
    except LeaseError as error:
        logger.warning("at event %s; the source cannot be asked how far it is: %s", standby.number, error)
