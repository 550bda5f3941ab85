"""Completed items as OpenLineage runs."""

from __future__ import annotations

import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from lease_core.errors import InvalidInput
from lease_core.model import EventType, LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.errors import RefusedForGood, SinkUnavailable
from lease_core.replication.sinks.address import without_userinfo
from lease_core.replication.sinks.http import is_elsewhere

_PRODUCER = "urn:omnirelay:relay"
_LEASE_FACET = "urn:omnirelay:lease-run-facet:1"
_LATER = frozenset({401, 403, 407, 408, 421, 423, 425, 429})


class OpenLineageSink:
    """Emits one COMPLETE run event for each completed item; other events pass by.

    The job is the resource type in the queue's namespace. The item's resource is the input; what the result names under
    ``uri``, ``uris`` or ``outputs`` (or the result itself, if it is a text) are the outputs. Who held the lease is the
    job's owner, and the run facet ``omnirelay_lease`` has owner, principal, attempt, fence and log number. The run id
    follows from the lease, so a repeated event is the same run. ``transport`` is as in OpenLineage's own
    configuration; ``url`` is short for its HTTP transport, where a name and a password in it go as Basic authentication
    and into no log. Of what ``transport`` has, that client logs all but ``auth`` at debug level.
    """

    def __init__(
        self, url: str | None = None, name: str = "openlineage", *, transport: Mapping[str, Any] | None = None
    ) -> None:
        if (url is None) == (transport is None):
            raise InvalidInput("url", "give either url or transport")
        self.name = name
        self._transport = dict(transport or {"type": "http", "url": url})
        self._secret = ""
        if self._transport.get("type") == "http":
            self._transport["url"], self._secret = without_userinfo("url", str(self._transport.get("url") or ""))
        self._client: Any = None

    def deliver(self, batch: Batch) -> None:
        for event in batch.events:
            if event.type == EventType.COMPLETED and event.item is not None:
                self._emit(event)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _emit(self, event: LeaseEvent) -> None:
        made = run_event(event)
        try:
            if self._client is None:
                self._client = _client(self._transport, self._secret)
            self._client.emit(made)
        except Exception as error:  # each transport raises its own
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(status, int) and is_elsewhere(status):
                said = f"the OpenLineage backend answered {status}: it is not at this url; check the sink's url"
                raise SinkUnavailable(said) from None
            if isinstance(status, int) and 400 <= status < 500 and status not in _LATER:
                raise RefusedForGood(f"the backend answered {status}", event.sequence_number) from None
            said = f"answered {status}" if status else type(error).__name__
            raise SinkUnavailable(f"the OpenLineage backend cannot be reached ({said})") from None


def _client(transport: Mapping[str, Any], secret: str) -> Any:
    """OpenLineage's client, whose own configuration (a file, the environment) goes together with ``transport``."""
    from openlineage.client import OpenLineageClient

    client = OpenLineageClient(config={"transport": dict(transport)})
    if secret:
        from openlineage.client.transport.http import HttpTransport, TokenProvider

        class Basic(TokenProvider):
            def get_bearer(self) -> str:
                return "Basic " + b64encode(secret.encode()).decode()

        if isinstance(client.transport, HttpTransport):
            client.transport.config.auth = Basic({})
    return client


def run_event(event: LeaseEvent) -> Any:
    """The completed item as an OpenLineage run event."""
    try:
        from openlineage.client import event_v2
        from openlineage.client.facet_v2 import ownership_job
    except ImportError as error:
        raise InvalidInput(
            "type", f"openlineage needs its client ({error}); pip install 'omnirelay-dagster[openlineage]'"
        ) from error
    assert event.item is not None
    owners = [ownership_job.Owner(event.peer_id, "OWNER")] if event.peer_id else []
    return event_v2.RunEvent(
        eventType=event_v2.RunState.COMPLETE,
        eventTime=event.timestamp.isoformat(),
        producer=_PRODUCER,
        run=event_v2.Run(str(run_id(event)), {"omnirelay_lease": _lease_facet(event)}),
        job=event_v2.Job(
            event.namespace, event.item.resource_type, {"ownership": ownership_job.OwnershipJobFacet(owners)}
        ),
        inputs=[event_v2.InputDataset(*_dataset(event.item.resource_id, event.item.resource_type))],
        outputs=[event_v2.OutputDataset(*_dataset(uri, event.namespace)) for uri in _outputs(event.result)],
    )


def run_id(event: LeaseEvent) -> uuid.UUID:
    """The same for every delivery of the same completion, and another for every lease."""
    lease = f"{event.token.lease_id}:{event.token.fence}" if event.token else str(event.sequence_number)
    return uuid.uuid5(uuid.NAMESPACE_URL, f"omnirelay:{event.namespace}:{event.sequence_id}:{lease}")


def _lease_facet(event: LeaseEvent) -> Any:
    token = event.token
    said = {
        "owner": event.peer_id,
        "principal": event.principal,
        "sequenceNumber": event.sequence_number,
        "sequenceId": event.sequence_id,
        "attempt": token.attempt if token else event.attempt,
        "leaseId": token.lease_id if token else None,
        "fence": token.fence if token else None,
        "shardId": event.metadata.get("shard.id"),
    }
    return _facet_class()(**{key: value for key, value in said.items() if value is not None})


def _facet_class() -> Any:
    """The lease as a run facet: made here, as its base class comes with an optional library."""
    global _facet
    if _facet is None:
        import attr
        from openlineage.client.facet_v2 import RunFacet

        fields = ("owner", "principal", "sequenceNumber", "sequenceId", "attempt", "leaseId", "fence", "shardId")
        _facet = attr.make_class(
            "LeaseRunFacet",
            {name: attr.field(default=None) for name in fields},
            bases=(RunFacet,),
            class_body={"_get_schema": staticmethod(lambda: _LEASE_FACET)},
        )
    return _facet


_facet: Any = None


def _outputs(result: Any) -> Iterator[str]:
    match result:
        case str() if result:
            yield result
        case list():
            for each in result:
                yield from _outputs(each)
        case dict():
            for key in ("uri", "uris", "outputs"):
                yield from _outputs(result.get(key))


def _dataset(name: str, otherwise: str) -> tuple[str, str]:
    """A URI by OpenLineage's naming: the store is the namespace, the path the name."""
    parts = urlsplit(name)
    if not parts.scheme or not parts.path.strip("/"):
        return otherwise, name
    if not parts.netloc:
        return parts.scheme, parts.path
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.path.strip("/")
