"""Events to an HTTP endpoint, a batch a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple

from lease_core.errors import InvalidInput
from lease_core.replication.batch import Batch
from lease_core.replication.errors import RefusedForGood, SinkUnavailable
from lease_core.replication.sinks.address import without_userinfo

_OWN = frozenset(  # what a batch says of itself
    {"content-length", "content-type", "idempotency-key", "omnirelay-namespace", "omnirelay-first", "omnirelay-last"}
)
_LATER = frozenset({401, 403, 407, 408, 421, 423, 425, 429})
_ELSEWHERE = frozenset({404, 405, 410})


class HttpSink:
    """Posts each batch as JSON lines (``application/x-ndjson``).

    ``Idempotency-Key`` is ``namespace/first-last`` and each event has its number, by which the endpoint can tell what
    it has seen: after a crash of the relay some events come again, possibly in other batches. Answers: 2xx taken; 5xx,
    time outs, 408, 425 and 429 try again later (``Retry-After`` is kept to), and so are 401 and 403, and what says that
    the endpoint is not at this url: 3xx (none is followed), 404, 405 and 410. These are for an operator to mend, and no
    reason to go past any event; any other 4xx refuses the events for good.
    """

    def __init__(
        self,
        url: str,
        name: str = "http",
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        verify: bool | str = True,
    ) -> None:
        self._url, self._secret = without_userinfo("url", url)  # the client logs each request with its url
        self.name = name
        self._verify, self._timeout = verify, timeout
        self._headers = dict(headers or {})
        self._client: _Client | None = None

    def deliver(self, batch: Batch) -> None:
        httpx = _httpx()
        client = self._client = self._client or self._open(httpx)
        request = httpx.Request(
            "POST", client.url, headers=[*client.headers, *_headers(batch)], stream=client.stream(_body(batch))
        )
        try:
            answer = client.client.send(request)
        except httpx.HTTPError as error:  # its text may have the url in it, and that a password
            raise SinkUnavailable(f"no answer from the endpoint ({type(error).__name__})") from None
        if answer.is_success:
            return
        said = f"the endpoint answered {answer.status_code}: {answer.text[:200]}"
        if is_elsewhere(answer.status_code):
            said = f"{said}; it is not at this url, or not any more: check the sink's url"
        elif answer.status_code not in _LATER and not answer.is_server_error:
            raise RefusedForGood(said)
        raise SinkUnavailable(said, retry_after(answer.headers.get("Retry-After"), datetime.now(UTC)))

    def close(self) -> None:
        if self._client is not None:
            self._client.client.close()
            self._client = None

    def _open(self, httpx: Any) -> _Client:
        url = httpx.URL(self._url)
        name, _, password = self._secret.partition(":")
        secret = httpx.BasicAuth(name, password) if self._secret else None
        headers = httpx.Headers(self._headers)
        headers.setdefault("Host", url.netloc.decode())
        for name in _OWN.intersection(headers):
            del headers[name]
        client = httpx.Client(headers=headers, timeout=self._timeout, verify=self._verify, auth=secret)
        return _Client(client, url, client.headers.raw, _stream_type(httpx))


class _Client(NamedTuple):
    """A client, and what all its requests have in common: to work that out takes as long as to send a batch."""

    client: Any
    url: Any
    headers: list[tuple[bytes, bytes]]
    stream: Callable[[Iterator[bytes]], Any]


@cache
def _stream_type(httpx: Any) -> Callable[[Iterator[bytes]], Any]:
    class Stream(httpx.SyncByteStream):  # type: ignore[misc]
        def __init__(self, parts: Iterator[bytes]) -> None:
            self._parts = parts

        def __iter__(self) -> Iterator[bytes]:
            return self._parts

    return Stream


def _body(batch: Batch) -> Iterator[bytes]:
    """The events. Asked for more, once they are sent, it uses the time until there is an answer."""
    yield batch.payload
    if batch.meanwhile is not None:
        batch.meanwhile()


def _headers(batch: Batch) -> list[tuple[bytes, bytes]]:
    namespace = batch.namespace.encode("ascii", "backslashreplace")
    return [
        (b"Content-Length", b"%d" % len(batch.payload)),
        (b"Content-Type", b"application/x-ndjson"),
        (b"Idempotency-Key", b"%b/%d-%d" % (namespace, batch.first, batch.last)),
        (b"Omnirelay-Namespace", namespace),
        (b"Omnirelay-First", b"%d" % batch.first),
        (b"Omnirelay-Last", b"%d" % batch.last),
    ]


def is_elsewhere(status: int) -> bool:
    """Whether an answer says that what was asked for is not here. That is about the url, and not about any event."""
    return 300 <= status < 400 or status in _ELSEWHERE


def retry_after(said: str | None, now: datetime) -> float | None:
    """How many seconds ``Retry-After`` asks for, which it may say as such or as a date; None if it says neither."""
    if not said or said.isdecimal():
        return float(said) if said else None
    try:
        until = parsedate_to_datetime(said)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp() - now.timestamp())


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise InvalidInput("type", f"http needs httpx ({error}); pip install 'omnirelay-dagster[http]'") from error
    return httpx
