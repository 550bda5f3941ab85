"""Google's object store as obstore speaks to it: S3's interface with a few names of its own, so moto's S3 server stands
behind a gateway that translates them. No server of Google's own interface can be installed from a package index.
"""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, unquote

from tests.servers.s3 import S3Server

_SOMEBODY = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
_NOT_HANDED_ON = {"connection", "transfer-encoding", "date", "server"}


class GcsServer:
    """A gateway before ``behind``. A bucket of the one is a bucket of the other."""

    def __init__(self, behind: S3Server) -> None:
        self._behind = behind
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _gateway(behind))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def options(self) -> dict[str, Any]:
        """What obstore needs to know to reach it."""
        host, port = self._server.server_address[:2]
        key = {
            "gcs_base_url": f"http://{host!s}:{port}",
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        return {"service_account_key": json.dumps(key)}

    client_options = S3Server.client_options

    def make_bucket(self, name: str) -> str:
        return self._behind.make_bucket(name).replace("s3://", "gs://")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _as_s3_writes_it(target: str) -> str:
    """Google's client escapes all that can be escaped, slashes and hyphens too."""
    path, mark, query = target.partition("?")
    return quote(unquote(path), safe="/") + mark + query


def _gateway(behind: S3Server) -> type[BaseHTTPRequestHandler]:
    class Gateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _hand_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {"content-length": str(len(body)), "authorization": _SOMEBODY}
            if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
                if generation != "0":
                    self.send_error(501, "only put-if-absent is translated")
                    return
                headers["if-none-match"] = "*"
            if "range" in self.headers:
                headers["range"] = self.headers["range"]
            connection = HTTPConnection(behind.endpoint.removeprefix("http://"))
            try:
                connection.request(self.command, _as_s3_writes_it(self.path), body, headers)
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _NOT_HANDED_ON:
                    self.send_header(name, value)
            if "content-length" not in answer.headers:
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_DELETE = _hand_on

        def log_message(self, format: str, *args: Any) -> None:
            """Nobody reads it."""

    return Gateway
