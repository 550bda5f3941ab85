"""Deliver a queue's log to the sinks that the configuration names, until SIGTERM or Ctrl-C.

Exits with 1 once every sink has stopped for good.
"""

from __future__ import annotations

import argparse
import gc
import logging
import threading
from dataclasses import replace

from lease_core.cli.configured import configured
from lease_core.cli.staying import log_to_stderr, once_reached, stay, until_signalled
from lease_core.errors import StoreError
from lease_core.queue import LeaseQueue
from lease_core.replication.contract import Sink
from lease_core.replication.lane import SinkStatus
from lease_core.replication.refused import RefusedEvents
from lease_core.replication.relay import Relay, check_rules
from lease_core.replication.settings import Settings, load_settings

HELP = "deliver a queue's log to sinks"
logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="TOML", help="the configuration; OMNIRELAY_* variables override it")
    parser.add_argument(
        "--once",
        action="store_true",
        help="deliver what there is and exit (1 if a sink could not, or the queue cannot be reached)",
    )
    parser.add_argument("--report-every", type=float, default=60.0, metavar="SECONDS", help="how often to log progress")
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(options: argparse.Namespace) -> int:
    log_to_stderr(options.verbose)
    for chatty in ("httpx", "httpcore", "openlineage"):  # they log a line for every request, with its url
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings = configured(lambda: load_settings(options.config), options.config)
    sinks, refused = _sinks(settings), settings.relay.refused
    stopping = until_signalled()
    queue = _open(settings, stopping, patient=not options.once)
    if queue is None:
        return 0 if stopping.is_set() else 1
    rules = settings.rules()
    if options.once:
        rules = {name: replace(each, linger=0.0) for name, each in rules.items()}
    with queue:
        relay = Relay(
            queue,
            sinks,
            rules=rules,
            interval=settings.relay.interval,
            refused=RefusedEvents(refused) if refused else None,
        )
        return _once(relay) if options.once else _stay(relay, settings, options.report_every, stopping)


def _sinks(settings: Settings) -> list[Sink]:
    """The sinks, made before the queue is waited for: what is wrong with them is told at once, not when it is there."""
    sinks = settings.make_sinks()
    check_rules(settings.rules(), settings.relay.refused is not None, settings.relay.interval)
    return sinks


def _open(settings: Settings, stopping: threading.Event, *, patient: bool) -> LeaseQueue | None:
    """The queue. A relay that is started before its queue's database waits for it, unless it is to run once."""

    def reach() -> LeaseQueue:
        return LeaseQueue._open_existing(settings.relay.url, settings.relay.namespace)

    if patient:
        return once_reached(reach, stopping, StoreError)
    try:
        return reach()
    except StoreError as error:
        logger.error("nothing was delivered: %s", error)
        return None


def _once(relay: Relay) -> int:
    before: list[SinkStatus] = []
    while (found := relay.run_once()) != before and any(each.behind for each in found):
        _report(found)
        before = found
    relay.stop()
    _report(found)
    return 0 if all(each.state == "running" for each in found) else 1


def _stay(relay: Relay, settings: Settings, every: float, stopping: threading.Event) -> int:
    relay.start()
    gc.freeze()  # what was loaded by now stays, and need not be gone through again
    logger.info("relaying %s to %s", settings.relay.namespace, ", ".join(settings.enabled()))
    stay(stopping, every, lambda: _report(relay.status()), lambda: relay.running)
    well = relay.running
    ended = relay.stop(settings.relay.stop_timeout)
    found = relay.status()
    _report(found)
    if not well:
        logger.error("every sink has stopped: %s", "; ".join(f"{each.name}: {each.error}" for each in found))
    return 0 if ended and well else 1


def _report(found: list[SinkStatus]) -> None:
    for each in found:
        logger.info(
            "sink %s is %s at event %s, %s behind%s",
            each.name, each.state, each.position, each.behind, f": {each.error}" if each.error else "",
        )  # fmt: skip
