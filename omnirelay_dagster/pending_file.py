"""Files of queue items, one JSON document a line: written whole or not at all, and read with care."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import dagster as dg
import msgspec

from lease_core import LeaseError, LeaseQueue, PendingItem
from lease_core.model import from_json
from lease_core.replication.durable_file import force_folder

_AT_ONCE = 1_000
_SHORTEST_RETENTION = 60.0

Write = Callable[[Iterable[PendingItem]], None]


class Drained(NamedTuple):
    """What a drain to a file came to: items taken out now, and items that earlier drains had taken out."""

    items: int
    earlier: int


class Restored(NamedTuple):
    """What a restore from a file came to: items put back, and items that were there already."""

    items: int
    duplicates: int


def drain_to_file(
    queue: LeaseQueue, path: Path, limit: int | None, *, include_drained: bool = False, principal: str | None = None
) -> Drained:
    """Move pending items from the queue to a new file at ``path``.

    The file appears when all of it is on disk. If that fails, what was taken is put back. If the process dies in
    between, the queue still lists it under ``drained`` for its retention time, and ``include_drained`` writes it out.
    """
    if queue.config.retention < _SHORTEST_RETENTION:
        raise dg.Failure(
            f"the queue forgets drained items after {queue.config.retention:g} seconds, too soon to be a safety net: "
            f"set retention to {_SHORTEST_RETENTION:g} or more on the LeaseQueueResource",
            allow_retries=False,
        )
    taken: set[int] = set()
    earlier = 0
    try:
        with _new_file(path) as write:
            for page in _earlier(queue) if include_drained else ():
                write(page)
                earlier += len(page)
            for some in _drain(queue, limit, principal):
                taken.update(each.sequence_id for each in some)
                write(some)
    except BaseException as error:
        _put_back(queue, taken, error, principal)
        raise
    return Drained(len(taken), earlier)


def restore_from_file(queue: LeaseQueue, path: Path, *, principal: str | None = None) -> Restored:
    """Put the items of a file back, here or in another queue. Every line is read before the first item is restored."""
    for _ in _read(path):
        pass
    items = duplicates = 0
    batch: list[PendingItem] = []
    size = min(_AT_ONCE, queue.config.max_batch)

    def restore() -> tuple[int, int]:
        receipts = queue.restore(batch, principal=principal)
        batch.clear()
        known = sum(receipt.duplicate for receipt in receipts)
        return len(receipts) - known, known

    for pending in _read(path):
        batch.append(pending)
        if len(batch) == size:
            added, known = restore()
            items, duplicates = items + added, duplicates + known
    added, known = restore()
    return Restored(items + added, duplicates + known)


def _drain(queue: LeaseQueue, limit: int | None, principal: str | None) -> Iterator[list[PendingItem]]:
    left = limit
    while left is None or left > 0:
        size = _AT_ONCE if left is None else min(_AT_ONCE, left)
        some = queue.drain(size, principal=principal)
        if some:
            yield some
        if len(some) < size:
            return
        left = None if left is None else left - len(some)


def _earlier(queue: LeaseQueue) -> Iterator[list[PendingItem]]:
    """What was drained so far and not restored, page by page."""
    after = 0
    while page := queue.drained(after, _AT_ONCE):
        yield page
        after = page[-1].sequence_id


def _put_back(queue: LeaseQueue, taken: set[int], error: BaseException, principal: str | None) -> None:
    """Restore what a failed drain had taken. If even that fails, say where the items are: the first error stays."""
    if not taken:
        return
    try:
        for page in _earlier(queue):
            queue.restore([each for each in page if each.sequence_id in taken], principal=principal)
        error.add_note(f"the {len(taken)} items that had been taken are back in the queue")
    except LeaseError as second:
        error.add_note(
            f"and {len(taken)} items could not be put back ({second}): they are in queue.drained(); "
            "drain again with include_drained to write them out"
        )


@contextmanager
def _new_file(path: Path) -> Iterator[Write]:
    """Write a file that appears at ``path`` when the block has ended well and all of it is on disk, and never before.

    Each write is on disk when it returns. An existing file is never replaced.
    """
    if path.exists():
        raise dg.Failure(f"{path} exists already: give another path, or move it away", allow_retries=False)
    if not path.parent.is_dir():
        raise dg.Failure(f"the directory {path.parent} does not exist: make it, or give another path")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:

            def write(items: Iterable[PendingItem]) -> None:
                file.writelines(item.to_json() + b"\n" for item in items)
                file.flush()
                os.fsync(file.fileno())

            yield write
            write(())
        _appear(partial, path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _appear(partial: Path, path: Path) -> None:
    """Give the finished file its name, durably. A link, unlike a rename, cannot replace what came there meanwhile."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise dg.Failure(f"{path} was made by somebody else meanwhile: give another path") from None
    except OSError:  # a file system without links
        partial.rename(path)
    force_folder(path.parent)


def _read(path: Path) -> Iterator[PendingItem]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse(path, number, line)
    except OSError as error:
        raise dg.Failure(f"{path} cannot be read: {error.strerror or error}", allow_retries=False) from error


def _parse(path: Path, number: int, line: bytes) -> PendingItem:
    try:
        return from_json(PendingItem, line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise dg.Failure(
            f"{path}, line {number} is not a drained item ({error}). Nothing was restored: mend or remove the line",
            allow_retries=False,
        ) from error
