"""Take the logs of many queues over gRPC, keep them, and serve them to readers, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import threading

from lease_core.cli.configured import configured
from lease_core.cli.staying import log_to_stderr, once_reached, stay, until_signalled
from lease_core.errors import StoreUnavailable
from lease_core.replication.hub.server import HubServer
from lease_core.replication.hub.settings import HubSettings, load_hub_settings

HELP = "collect the logs of many queues"
logger = logging.getLogger(__name__)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="TOML", help="its table [hub]; OMNIRELAY_HUB__* variables override it")
    parser.add_argument("--url", help="the database; one with a password belongs in the environment")
    parser.add_argument("--listen", metavar="HOST:PORT", help="where to listen (127.0.0.1:8765)")
    parser.add_argument("--certificate", metavar="PEM", help="for TLS")
    parser.add_argument("--key", metavar="PEM", help="for TLS")
    parser.add_argument("--client-ca", metavar="PEM", help="for mutual TLS: who signs the sources' certificates")
    parser.add_argument(
        "--insecure", action="store_true", default=None, help="let other machines in without TLS: anybody may publish"
    )
    parser.add_argument(
        "--keep-days", type=float, metavar="N", help="let go of older events that all cursors have passed (keeps all)"
    )
    parser.add_argument("--report-every", type=float, default=60.0, metavar="SECONDS", help="how often to log progress")
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(options: argparse.Namespace) -> int:
    log_to_stderr(options.verbose)
    sys.setswitchinterval(0.0005)  # the thread that stores must not wait long for the one that listens
    named = ("url", "listen", "certificate", "key", "client_ca", "insecure", "keep_days")
    given = {name: getattr(options, name) for name in named}
    settings = configured(lambda: load_hub_settings(options.config, given=given), options.config, "--url")
    stopping = until_signalled()
    # a hub that is started before its database waits for it
    server = once_reached(lambda: settings.server().start(), stopping, StoreUnavailable)
    if server is None:
        return 0
    gc.freeze()  # what was loaded by now stays, and need not be gone through again
    try:
        _stay(server, settings, options.report_every, stopping)
    finally:
        server.stop()
    logger.info("the hub has stopped")
    return 0 if stopping.is_set() else 1


def _stay(server: HubServer, settings: HubSettings, every: float, stopping: threading.Event) -> None:
    host = settings.listen.rpartition(":")[0] or settings.listen
    secure = "mutual TLS" if settings.client_ca else "TLS" if settings.certificate else "no TLS"
    logger.info("the hub listens on %s port %d, %s", host, server.port, secure)
    reported = 0

    def report() -> None:
        nonlocal reported
        stored = server.stored
        logger.info("stored %d events, %d since the last report", stored, stored - reported)
        reported = stored

    stay(stopping, every, report, lambda: server.running)
