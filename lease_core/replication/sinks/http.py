"""Events to an HTTP endpoint, a batch a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from lease_core.errors import InvalidInput
from lease_core.replication.batch import Batch
from lease_core.replication.errors import RefusedForGood, SinkUnavailable

_LATER = frozenset({401, 403, 407, 408, 421, 423, 425, 429})


class HttpSink:
    """Posts each batch as JSON lines (``application/x-ndjson``).

    ``Idempotency-Key`` is ``namespace/first-last`` and each event has its number, by which the endpoint can tell what
    it has seen: after a crash of the relay some events come again, possibly in other batches. Answers: 2xx taken; 5xx,
    time outs, 408, 425 and 429 try again later (``Retry-After`` is kept to), and so are 401 and 403, which are for an
    operator to mend; any other 4xx refuses the events for good.
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
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidInput("url", "must begin with http:// or https://")
        self.name = name
        self._url, self._verify, self._timeout = url, verify, timeout
        self._headers = dict(headers or {})
        self._client: tuple[Any, Any] | None = None

    def deliver(self, batch: Batch) -> None:
        httpx = _httpx()
        client, url = self._open(httpx)
        try:
            answer = client.post(url, content=_body(batch), headers=_headers(batch))
        except httpx.HTTPError as error:  # its text may have the url in it, and that a password
            raise SinkUnavailable(f"no answer from the endpoint ({type(error).__name__})") from None
        if answer.is_success:
            return
        said = f"the endpoint answered {answer.status_code}: {answer.text[:200]}"
        if answer.status_code in _LATER or answer.is_server_error:
            raise SinkUnavailable(said, _retry_after(answer.headers.get("Retry-After")))
        raise RefusedForGood(said)

    def close(self) -> None:
        if self._client is not None:
            self._client[0].close()
            self._client = None

    def _open(self, httpx: Any) -> tuple[Any, Any]:
        """A client, and the url, taken apart once rather than for every request."""
        if self._client is None:
            client = httpx.Client(headers=self._headers, timeout=self._timeout, verify=self._verify)
            self._client = client, httpx.URL(self._url)
        return self._client


def _body(batch: Batch) -> Iterator[bytes]:
    """The events. Asked for more, once they are sent, it uses the time until there is an answer."""
    yield batch.payload
    if batch.meanwhile is not None:
        batch.meanwhile()


def _headers(batch: Batch) -> dict[str, str]:
    namespace = batch.namespace.encode("ascii", "backslashreplace").decode()
    return {
        "Content-Length": str(len(batch.payload)),
        "Content-Type": "application/x-ndjson",
        "Idempotency-Key": f"{namespace}/{batch.first}-{batch.last}",
        "Omnirelay-Namespace": namespace,
        "Omnirelay-First": str(batch.first),
        "Omnirelay-Last": str(batch.last),
    }


def _retry_after(said: str | None) -> float | None:
    return float(said) if said and said.isdecimal() else None


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise InvalidInput("type", f"http needs httpx ({error}); pip install 'omnirelay-dagster[http]'") from error
    return httpx
