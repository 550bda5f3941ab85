"""One source's log, read back from the hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lease_core.model import LeaseEvent
from lease_core.replication.errors import CorruptCopy
from lease_core.replication.hub import wire
from lease_core.replication.hub.client import HubClient, meaning
from lease_core.replication.hub.credentials import PathLike
from lease_core.replication.paged import Line, Paged, PagedLines
from lease_core.replication.sealed import Block, Seal, Torn, blocks

_ASK_SECONDS = 10.0


def read_hub(
    address: str,
    source: str,
    namespace: str = "resourcelease",
    *,
    ca: PathLike | None = None,
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    insecure: bool = False,
    server_name: str | None = None,
) -> HubCopy:
    """The copy of ``source``'s log that the hub at ``address`` keeps."""
    client = HubClient(address, ca=ca, certificate=certificate, key=key, insecure=insecure, server_name=server_name)
    return HubCopy(client, source, namespace)


class HubCopy:
    """A source that reads from the hub, and checks every batch against its seal and the batch before it."""

    def __init__(self, client: HubClient, source: str, namespace: str) -> None:
        self.namespace = namespace
        self._client, self._source = client, source
        self._place = f"hub {client.address}, {source}/{namespace}"
        self.events = Paged(self.read).events
        self.event_payload = PagedLines(self._read_lines).event_payload

    def read(self, after: int = 0) -> Iterator[LeaseEvent]:
        """The events above ``after``. Raises ``CorruptCopy`` at the first that is damaged, after all before it."""
        for block in self._blocks(after):
            for event in block.events(self._place):
                if event.sequence_number > after:
                    yield event

    def _read_lines(self, after: int) -> Iterator[Line]:
        for block in self._blocks(after):
            yield from (line for line in block.lines(self._place) if line.sequence_number > after)

    def seals(self, after: int = 0) -> Iterator[Seal]:
        """The seal of each batch with events above ``after``, once the batch was read and checked."""
        return (block.seal for block in self._blocks(after))

    def last(self) -> int | None:
        """The number of the last event that the hub holds; none if it holds none."""
        request = wire.messages().PositionRequest(source=self._source, namespace=self.namespace)
        try:
            return self._client.stub().Position(request, timeout=_ASK_SECONDS).last or None
        except wire.grpc().RpcError as error:
            raise meaning(error) from None

    def close(self) -> None:
        self._client.close()

    def _blocks(self, after: int) -> Iterator[Block]:
        before: Seal | None = None
        for batch in self._batches(after):
            found = self._checked(batch, before, after)
            if before is None and after and found.seal.first > after + 1:  # a copy may begin late, not leave out
                missing = f"events {after + 1} to {found.seal.first - 1} are missing"
                raise CorruptCopy(self._place, missing, after)
            yield found
            before = found.seal

    def _checked(self, batch: Any, before: Seal | None, after: int) -> Block:
        if batch.HasField("damage"):
            raise CorruptCopy(self._place, batch.damage.reason, batch.damage.last_good)
        count = batch.last - batch.first + 1
        seal = Seal(batch.namespace, batch.first, batch.last, count, batch.previous, batch.sha256)
        try:
            [block] = blocks(batch.lines + seal.line(), self._place, before, max(after, batch.first - 1))
        except Torn:
            last_good = before.last if before else max(after, batch.first - 1)
            raise CorruptCopy(self._place, "the events are not those that were sealed", last_good) from None
        return block

    def _batches(self, after: int) -> Iterator[Any]:
        request = wire.messages().ReadRequest(source=self._source, namespace=self.namespace, after=after)
        failed = wire.grpc().RpcError
        call = self._client.stub().Read(request)
        try:
            yield from call
        except failed as error:
            raise meaning(error) from None
        finally:
            call.cancel()
