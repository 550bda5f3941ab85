"""A TCP line to a server that can be cut around a chosen message, or go silent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self


class Line:
    """One connection through the proxy: two threads, each carrying bytes one way."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        for act in (self._carry_requests, self._carry_answers):
            threading.Thread(target=act, daemon=True).start()

    def cut(self) -> None:
        self.cut_client()
        self.cut_server()

    def cut_client(self) -> None:
        _close(self.client)

    def cut_server(self) -> None:
        _close(self.server)

    def _carry_requests(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(1 << 16):
                self.proxy.flowing.wait()
                if not self.proxy.on_request(self, data):
                    self.server.sendall(data)
            self.cut_server()

    def _carry_answers(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(1 << 16):
                self.proxy.flowing.wait()
                if not self.proxy.on_answer(self, data):
                    self.client.sendall(data)
            self.cut_client()


class Proxy:
    """Listens on a port of its own. ``on_request`` and ``on_answer`` see all bytes, and return True to keep them."""

    url = ""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lines: list[Line] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.flowing = threading.Event()
        self.flowing.set()
        self.behave()

    def behave(self) -> None:
        """Carry everything."""
        self.on_request: Callable[[Line, bytes], bool] = lambda line, data: False
        self.on_answer: Callable[[Line, bytes], bool] = lambda line, data: False

    def freeze(self) -> None:
        """Carry nothing, without closing anything: the network as a dead switch leaves it."""
        self.flowing.clear()

    def thaw(self) -> None:
        self.flowing.set()

    def cut_all(self) -> None:
        for line in self._lines:
            line.cut()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._listener)
        self.thaw()
        self.cut_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._lines.append(Line(self, client, server))


def _close(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
