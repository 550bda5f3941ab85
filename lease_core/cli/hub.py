"""Take the logs of many queues over gRPC, keep them, and serve them to readers, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import threading
import time

from lease_core.errors import StoreUnavailable
from lease_core.replication.backoff import Backoff
from lease_core.replication.hub.server import HubServer
from lease_core.replication.hub.settings import HubSettings, load_hub_settings

HELP = "collect the logs of many queues"
logger = logging.getLogger(__name__)

_WAKE = 0.5
"""Seconds: a signal that comes just before a wait begins does not end it, so no wait is long."""


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
    parser.add_argument("--report-every", type=float, default=60.0, metavar="SECONDS", help="how often to log progress")
    parser.add_argument("--verbose", action="store_true", help="log more")


def run(options: argparse.Namespace) -> int:
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    sys.setswitchinterval(0.0005)  # the thread that stores must not wait long for the one that listens
    named = ("url", "listen", "certificate", "key", "client_ca", "insecure")
    settings = load_hub_settings(options.config, given={name: getattr(options, name) for name in named})
    stopping = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stopping.set())
    server = _start(settings, stopping)
    if server is None:
        return 0
    gc.freeze()  # what was loaded by now stays, and need not be gone through again
    try:
        _stay(server, settings, options.report_every, stopping)
    finally:
        server.stop()
    logger.info("the hub has stopped")
    return 0 if stopping.is_set() else 1


def _start(settings: HubSettings, stopping: threading.Event) -> HubServer | None:
    """The hub, once its database can be reached: a hub that is started first waits."""
    failures = 0
    while not stopping.is_set():
        try:
            return settings.server().start()
        except StoreUnavailable as error:
            failures += 1
            pause = Backoff(0.5, 30.0).pause(failures)
            logger.warning("%s, next try in %.1f s", error, pause)
            stopping.wait(pause)
    return None


def _stay(server: HubServer, settings: HubSettings, every: float, stopping: threading.Event) -> None:
    host = settings.listen.rpartition(":")[0] or settings.listen
    secure = "mutual TLS" if settings.client_ca else "TLS" if settings.certificate else "no TLS"
    logger.info("the hub listens on %s port %d, %s", host, server.port, secure)
    reported, report_at = 0, time.monotonic() + every
    while not stopping.wait(_WAKE) and server.running:
        if time.monotonic() >= report_at:
            stored, report_at = server.stored, time.monotonic() + every
            logger.info("stored %d events, %d since the last report", stored, stored - reported)
            reported = stored
