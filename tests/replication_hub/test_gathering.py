"""When the hub commits: at once for a source that waits for its answer, for many together where sources send ahead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lease_core.replication.hub import writer as writing
from lease_core.replication.hub.admission import Offer, Verdict, check
from lease_core.replication.hub.store import HubStore
from lease_core.replication.hub.writer import Writer
from tests.replication_hub.batches import batch

FOR_EVER = 3_600.0


def offer(number: int, source: str = "a") -> Offer:
    message = batch(number, number)
    found = check(source, message, message.lines)
    assert isinstance(found, Offer)
    return found


@asynccontextmanager
async def a_writer(folder: Path, **given: int) -> AsyncIterator[Writer]:
    store = HubStore(f"sqlite:///{folder}/hub.db")
    writer = Writer(store, **given)
    try:
        yield writer
    finally:
        await writer.close()
        store.close()


async def offered(writer: Writer, first: int, last: int) -> list[asyncio.Future[Verdict]]:
    return [await writer.offer(offer(number)) for number in range(first, last + 1)]


async def nothing_is_stored(verdicts: list[asyncio.Future[Verdict]]) -> bool:
    done, _ = await asyncio.wait(verdicts, timeout=0.1)
    return not done


async def all_are_stored(verdicts: list[asyncio.Future[Verdict]]) -> bool:
    return all(each.outcome == "STORED" for each in await asyncio.gather(*verdicts))


def test_a_source_that_waits_for_each_answer_waits_for_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)

    async def run() -> None:
        async with a_writer(tmp_path) as writer:
            for number in range(1, 6):
                assert await all_are_stored(await offered(writer, number, number))
            assert writer.commits == 5

    asyncio.run(run())


def test_two_under_way_are_stored_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)

    async def run() -> None:
        async with a_writer(tmp_path) as writer:
            under_way = await offered(writer, 1, 2)
            for number in range(3, 8):
                assert await all_are_stored([under_way.pop(0)])
                under_way += await offered(writer, number, number)
            assert await all_are_stored(under_way)

    asyncio.run(run())


def test_half_of_what_sources_send_ahead_is_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)

    async def run() -> None:
        async with a_writer(tmp_path) as writer:
            assert await all_are_stored(await offered(writer, 1, 8))
            before = writer.commits
            verdicts = await offered(writer, 9, 11)
            assert await nothing_is_stored(verdicts)
            verdicts += await offered(writer, 12, 12)
            assert await all_are_stored(verdicts)
            assert writer.commits == before + 1

    asyncio.run(run())


def test_what_comes_alone_after_many_is_stored_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with a_writer(tmp_path) as writer:
            assert await all_are_stored(await offered(writer, 1, 40))
            assert await all_are_stored(await offered(writer, 41, 41))
            monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)
            assert await all_are_stored(await offered(writer, 42, 42))

    asyncio.run(run())


def test_a_burst_is_forgotten_once_less_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However closely the batches after it follow each other: here there is never a gap that would end the waiting."""
    monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)

    async def run() -> None:
        async with a_writer(tmp_path) as writer:
            last = 0
            for many in (64, 32, 16, 8, 4, 2, 1, 1):  # each is half of what was under way before
                assert await all_are_stored(await offered(writer, last + 1, last + many))
                last += many

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("limits", [{"group_bytes": 400}, {"most_pending": 400}])
def test_no_more_is_waited_for_than_there_is_room_for(
    limits: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)
    assert 100 < len(offer(1).lines) < 400

    async def run() -> None:
        async with a_writer(tmp_path, **limits) as writer:
            writer._most_under_way = 64
            offering = asyncio.create_task(offered(writer, 1, 12))
            assert await all_are_stored((await offering)[:8])

    asyncio.run(run())


def test_stopping_waits_for_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PATIENCE", FOR_EVER)

    async def run() -> None:
        async with a_writer(tmp_path) as writer:
            assert await all_are_stored(await offered(writer, 1, 40))
            verdicts = await offered(writer, 41, 43)
            assert await nothing_is_stored(verdicts)
        assert await all_are_stored(verdicts)

    asyncio.run(run())
