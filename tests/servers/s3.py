"""An S3 server: moto's, which honours put-if-absent."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Self

from tests.servers.ports import free_port


class S3Server:
    """Served from a thread of this process, in memory."""

    def __init__(self) -> None:
        self._port = free_port()
        self._server: Any = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def options(self) -> dict[str, Any]:
        """What obstore needs to know to reach it."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
            "virtual_hosted_style_request": "false",
        }

    client_options = {"allow_http": "true"}  # noqa: RUF012

    def make_bucket(self, name: str) -> str:
        import boto3

        boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        ).create_bucket(Bucket=name)
        return f"s3://{name}"

    def __enter__(self) -> Self:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
