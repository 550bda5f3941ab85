"""The service that ``hub.proto`` describes, on a store and a writer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from lease_core.errors import EventsPruned
from lease_core.replication.errors import CorruptCopy
from lease_core.replication.hub import wire
from lease_core.replication.hub.admission import Verdict, check
from lease_core.replication.hub.identity import Caller, NotYou
from lease_core.replication.hub.schema import why
from lease_core.replication.hub.store import Held, HubStore
from lease_core.replication.hub.writer import Writer

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_AGAIN = 1.0
"""Seconds between looks at a store to which another hub may append as well."""
_CHECKED_ASIDE = 2 << 20
"""Bytes of a batch that would keep other streams waiting while it is checked."""
_UNDER_WAY = 64
"""Batches of one stream that may wait for their answer."""


class Servicer:
    """Answers calls. Nothing is read from a stream that could not be kept, nothing sent that was not asked for.

    What a slow reader costs is one page: the next is read from the store when gRPC's flow control has taken the last.
    """

    def __init__(self, store: HubStore, writer: Writer, most_bytes: int, stopping: asyncio.Event) -> None:
        self._store, self._writer, self._most_bytes, self._stopping = store, writer, most_bytes, stopping
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="hub")
        self._grpc, self._messages = wire.grpc(), wire.messages()

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    # Sources

    async def Publish(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        caller = Caller.of(context.auth_context())
        answers: asyncio.Queue[asyncio.Future[Verdict] | BaseException | None] = asyncio.Queue(_UNDER_WAY)
        taking = asyncio.create_task(self._take(requests, caller, answers))
        ending = asyncio.create_task(self._end_with_the_hub(taking))
        try:
            while (verdict := await answers.get()) is not None:
                if isinstance(verdict, NotYou):
                    await context.abort(self._grpc.StatusCode.PERMISSION_DENIED, str(verdict))
                elif isinstance(verdict, BaseException):
                    raise verdict
                else:
                    yield self._answer(await verdict)
            if self._stopping.is_set():
                await context.abort(self._grpc.StatusCode.UNAVAILABLE, "the hub is stopping")
        finally:
            taking.cancel()
            ending.cancel()

    async def _take(self, requests: AsyncIterator[Any], caller: Caller, answers: asyncio.Queue[Any]) -> None:
        """Offer each batch to the writer and queue the verdicts to come, in order."""
        end: BaseException | None = None
        try:
            async for batch in requests:
                source = caller.source(batch.source)
                lines = batch.lines  # each look at it is a copy of it
                large = len(lines) > _CHECKED_ASIDE
                offer = await self._aside(check, source, batch, lines) if large else check(source, batch, lines)
                if isinstance(offer, Verdict):
                    self._writer.telemetry.invalid(source)
                    known: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
                    known.set_result(offer)
                    await answers.put(known)
                else:
                    await answers.put(await self._writer.offer(offer))
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                raise
        except Exception as error:
            end = error
        await answers.put(end)

    async def _end_with_the_hub(self, taking: asyncio.Task[None]) -> None:
        await self._stopping.wait()
        taking.cancel()

    def _answer(self, verdict: Verdict) -> Any:
        return self._messages.Answer(
            outcome=self._messages.Outcome.Value(verdict.outcome),
            next=verdict.next,
            reason=verdict.reason,
            sequence_number=verdict.sequence_number,
        )

    async def Position(self, request: Any, context: Any) -> Any:
        try:
            source = Caller.of(context.auth_context()).source(request.source)
        except NotYou as error:
            await context.abort(self._grpc.StatusCode.PERMISSION_DENIED, str(error))
        end = await self._from_store(context, self._store.end, source, request.namespace)
        return self._messages.PositionReply(
            first=end.first if end else 0, last=end.last if end else 0, most_bytes=self._most_bytes
        )

    # Readers

    async def Read(self, request: Any, context: Any) -> AsyncIterator[Any]:
        source = request.source or Caller.of(context.auth_context()).owner
        after = max(0, request.after)
        while page := await self._from_store(context, _or_damage, self._whole_page, source, request.namespace, after):
            if isinstance(page, CorruptCopy):
                yield self._messages.Batch(damage=self._damage(page))
                return
            for held in page:
                after = held.seal.last
                yield self._batch(held)
            if self._stopping.is_set():
                await context.abort(self._grpc.StatusCode.UNAVAILABLE, "the hub is stopping")

    def _batch(self, held: Held) -> Any:
        return self._messages.Batch(
            source=held.source,
            namespace=held.seal.namespace,
            first=held.seal.first,
            last=held.seal.last,
            lines=held.lines,
            previous=held.seal.previous,
            sha256=held.seal.sha256,
        )

    def _damage(self, found: CorruptCopy) -> Any:
        logger.error("the hub's store is damaged: %s", found)
        return self._messages.Damage(last_good=found.last_good, reason=found.problem)

    def _whole_page(self, source: str, namespace: str, after: int) -> list[Held]:
        """The next page; none only if there is nothing that should be there."""
        page = self._store.page(source, namespace, after)
        if not page and (end := self._store.end(source, namespace)) and end.last > after:
            page = self._store.page(source, namespace, after)  # it may just have arrived
            if not page:
                raise CorruptCopy("the hub's store", f"events {after + 1} to {end.last} are missing", after)
        return page

    async def Follow(self, request: Any, context: Any) -> AsyncIterator[Any]:
        after = max(0, request.after)
        if request.reader and not after:
            owner = Caller.of(context.auth_context()).owner
            after = await self._from_store(context, self._store.cursor, owner, request.reader)
        while not self._stopping.is_set():
            seen = self._writer.commits
            page = await self._from_store(
                context, _or_damage, self._store.merged, after, request.source, request.namespace
            )
            if isinstance(page, CorruptCopy):
                yield self._messages.Merged(damage=self._damage(page))
                return
            for held in _joined(_above(after, page)):
                yield self._messages.Merged(
                    source=held.source,
                    namespace=held.seal.namespace,
                    position=held.position,
                    first=held.seal.first,
                    lines=held.lines,
                )
                after = held.position + held.seal.count - 1
            if not page and request.once:
                return
            if not page:
                await self._writer.wait_for_more(seen, _LOOK_AGAIN)
        await context.abort(self._grpc.StatusCode.UNAVAILABLE, "the hub is stopping")

    async def KeepCursor(self, request: Any, context: Any) -> Any:
        if not request.reader or len(request.reader) > 255 or "\x00" in request.reader or request.position < 0:
            await context.abort(
                self._grpc.StatusCode.INVALID_ARGUMENT, "reader: a name of 1 to 255 characters; position: 0 or more"
            )
        head = await self._from_store(context, self._store.head)
        if request.position > head:
            await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, f"position: the hub ends at {head}")
        owner = Caller.of(context.auth_context()).owner
        kept = await self._from_store(context, self._store.keep_cursor, owner, request.reader, request.position)
        return self._messages.Cursor(reader=request.reader, position=kept)

    async def Sources(self, request: Any, context: Any) -> Any:
        ends = await self._from_store(context, self._store.ends)
        return self._messages.SourcesReply(
            head=await self._from_store(context, self._store.head),
            sources=[
                self._messages.SourceStatus(
                    source=each.source, namespace=each.namespace, first=each.first, last=each.last
                )
                for each in ends
            ],
        )

    # The store, from another thread

    async def _from_store(self, context: Any, call: Callable[..., T], *given: Any) -> T:
        try:
            return await self._aside(call, *given)
        except EventsPruned as gap:
            await context.abort(self._grpc.StatusCode.OUT_OF_RANGE, f"{gap.after} {gap.oldest}")
        except Exception as error:  # its text may have the database's address in it
            logger.error("the hub cannot use its store: %s", why(error))
            await context.abort(self._grpc.StatusCode.UNAVAILABLE, f"the hub cannot use its store ({why(error)})")
        raise AssertionError("abort raises")

    async def _aside(self, call: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *given)


def _or_damage(read: Callable[..., list[Held]], *given: Any) -> list[Held] | CorruptCopy:
    try:
        return read(*given)
    except CorruptCopy as damage:
        return damage


def _above(position: int, page: list[Held]) -> list[Held]:
    """The page without what its first batch has up to ``position``."""
    if not page or page[0].position > position:
        return page
    gone = position - page[0].position + 1
    seal, lines = page[0].seal, page[0].lines.split(b"\n")[gone:]
    rest = msgspec.structs.replace(seal, first=seal.first + gone, count=seal.count - gone, sha256="")
    return [Held(page[0].source, position + 1, rest, b"\n".join(lines)), *page[1:]]


def _joined(page: list[Held]) -> list[Held]:
    """Batches of one source that follow each other as one, so that a reader of many small ones gets few messages."""
    joined: list[list[Held]] = []
    for held in page:
        last = joined[-1][-1] if joined else None
        follows = last is not None and (last.source, last.seal.namespace, last.seal.last + 1) == (
            held.source, held.seal.namespace, held.seal.first,
        )  # fmt: skip
        if last is not None and follows and last.position + last.seal.count == held.position:
            joined[-1].append(held)
        else:
            joined.append([held])
    return [run[0] if len(run) == 1 else _run(run) for run in joined]


def _run(run: list[Held]) -> Held:
    first, last = run[0].seal, run[-1].seal
    whole = msgspec.structs.replace(first, last=last.last, count=last.last - first.first + 1, sha256="")
    return Held(run[0].source, run[0].position, whole, b"".join(each.lines for each in run))
