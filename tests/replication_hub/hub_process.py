"""The hub as its users run it, in a process of its own that can be killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.servers.ports import free_port


class HubProcess:
    """`omnirelay hub` on a port of its own, which stays the same across restarts."""

    def __init__(self, url: str, log: Path, *arguments: str, host: str = "127.0.0.1") -> None:
        self._url, self._log, self._arguments = url, log, arguments
        self.host, self.port = host, free_port()
        self.address = f"{host}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lease_core.cli", "hub", "--listen", self.address, *self._arguments],
                env={**os.environ, "OMNIRELAY_HUB__URL": self._url},
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((self.host, self.port), 1).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(self.log()) from None
                time.sleep(0.02)

    def log(self) -> str:
        return self._log.read_text()[-3_000:]

    def memory(self) -> int:
        assert self._process is not None
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """Ask it to stop and give its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
        self._process = None
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
