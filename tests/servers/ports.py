"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port below the ephemeral range, so that no client is given it while a killed server is away."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
