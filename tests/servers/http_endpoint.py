"""An HTTP endpoint that takes events as a careful receiver would, and lineage as a backend would."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.servers.ports import free_port


class HttpEndpoint:
    """`events` are those taken, each once, by number; `calls` counts requests; `runs` are lineage events by run id.

    `answer` may be set to a function of the events of a request that gives a status to answer with instead; that answer
    has `retry_after`.
    """

    def __init__(self) -> None:
        self._port = free_port()
        self.events: list[dict[str, Any]] = []
        self.runs: dict[str, dict[str, Any]] = {}
        self.headers: list[dict[str, str]] = []
        self.calls = 0
        self.retry_after = "0"
        self.answer: Callable[[list[dict[str, Any]]], int | None] = lambda events: None
        routes = [
            Route("/events", self._take, methods=["POST"]),
            Route("/api/v1/lineage", self._take_lineage, methods=["POST"]),
        ]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=self._port, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        return f"{self.root}/events"

    async def _take(self, request: Request) -> Response:
        body = await request.body()
        events = [json.loads(line) for line in body.splitlines()]
        self.calls += 1
        self.headers.append(dict(request.headers))
        if status := self.answer(events):
            return PlainTextResponse("as told", status, headers={"Retry-After": self.retry_after})
        seen = self.events[-1]["sequenceNumber"] if self.events else 0
        self.events.extend(event for event in events if event["sequenceNumber"] > seen)
        return PlainTextResponse("taken")

    async def _take_lineage(self, request: Request) -> Response:
        event = json.loads(await request.body())
        self.calls += 1
        if status := self.answer([event]):
            return PlainTextResponse("as told", status)
        self.headers.append(dict(request.headers))
        self.runs[event["run"]["runId"]] = event
        return PlainTextResponse("taken", 201)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise RuntimeError("the endpoint did not start")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(10)
