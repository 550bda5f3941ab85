"""Deliver a queue's log to the sinks that the configuration names, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import gc
import logging
import threading
from dataclasses import replace

from lease_core.cli.staying import log_to_stderr, once_reached, stay, until_signalled
from lease_core.errors import StoreError
from lease_core.queue import LeaseQueue
from lease_core.replication.lane import SinkStatus
from lease_core.replication.refused import RefusedEvents
from lease_core.replication.relay import Relay
from lease_core.replication.settings import Settings, load_settings

HELP = "deliver a queue's log to sinks"
logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="TOML", help="the configuration; OMNIRELAY_* variables override it")
    parser.add_argument("--once", action="store_true", help="deliver what there is and exit (1 if a sink could not)")
    parser.add_argument("--report-every", type=float, default=60.0, metavar="SECONDS", help="how often to log progress")
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(options: argparse.Namespace) -> int:
    log_to_stderr(options.verbose)
    for chatty in ("httpx", "httpcore", "openlineage"):  # they log a line for every request, with its url
        logging.getLogger(chatty).setLevel(logging.WARNING)
    settings = load_settings(options.config)
    stopping = until_signalled()
    # a relay that is started before its queue's database waits for it
    queue = once_reached(
        lambda: LeaseQueue._open_existing(settings.relay.url, settings.relay.namespace), stopping, StoreError
    )
    if queue is None:
        return 0
    rules = settings.rules()
    if options.once:
        rules = {name: replace(each, linger=0.0) for name, each in rules.items()}
    with queue:
        relay = Relay(
            queue,
            settings.make_sinks(),
            rules=rules,
            interval=settings.relay.interval,
            refused=RefusedEvents(settings.relay.refused) if settings.relay.refused else None,
        )
        return _once(relay) if options.once else _stay(relay, settings, options.report_every, stopping)


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
    stay(stopping, every, lambda: _report(relay.status()), lambda: True)
    ended = relay.stop(settings.relay.stop_timeout)
    _report(relay.status())
    return 0 if ended else 1


def _report(found: list[SinkStatus]) -> None:
    for each in found:
        logger.info(
            "sink %s is %s at event %s, %s behind%s",
            each.name, each.state, each.position, each.behind, f": {each.error}" if each.error else "",
        )  # fmt: skip
