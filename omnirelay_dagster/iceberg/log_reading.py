"""From the log to the parquet files of batches, in its order and a bounded number at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.model import Completion
from omnirelay_dagster.iceberg.errors import FilesWrong
from omnirelay_dagster.manifest import Published, parse

_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class Batch(NamedTuple):
    """One published output. The log is done with it at number ``upto``: pieces of a batch follow each other."""

    published: Published
    upto: int


class ParquetFile(NamedTuple):
    """A file of a batch. ``values`` are columns that only the names of its folders tell: Spark's partitionBy."""

    batch: Batch
    path: str
    uri: str
    size: int
    values: dict[str, str | None]


class Chunk(NamedTuple):
    """Batches to be committed together. With them the log is in the table up to ``upto``, its end if ``ended``."""

    batches: list[Batch]
    upto: int
    ended: bool


def next_chunk(
    queue: LeaseQueue, subject: str, after: int, most: int, *, done: str = "", as_of: int | None = None
) -> Chunk:
    """The next ``most`` batches of ``subject`` after number ``after``, or as many as there are.

    ``done`` is the lease of the last batch before. An ``as_of`` can fall between two pieces that the log has of a
    batch; the batch counts where it begins, and the pieces after that number are not another one.
    """
    batches: list[Batch] = []
    while True:
        found, reached = _completions(queue, after, as_of)
        for batch in _batches(found, subject):
            if batch.published.lease_id == done:
                continue
            if len(batches) == most:
                return Chunk(batches, batches[-1].upto, False)
            batches.append(batch)
        if reached == after:
            return Chunk(batches, reached, True)
        after = reached


def _completions(queue: LeaseQueue, after: int, as_of: int | None) -> tuple[list[Completion], int]:
    try:
        return queue.completions(after, as_of=as_of)
    except EventsPruned as pruned:
        if after:
            pruned.add_note("batches that are not in the table yet are no longer in the log: was its reader dropped?")
            raise
        return [], pruned.oldest - 1  # nothing was published before: publishing keeps the log from there on


def _batches(found: list[Completion], subject: str) -> Iterator[Batch]:
    """The batches among completions. One transaction completes a batch, and a page never ends within one, so all
    pieces that the log has of it are here, next to each other."""
    last: Batch | None = None
    for completion in found:
        output = parse(completion)
        if output is None or output.subject != subject:
            continue
        if last is not None and last.published.lease_id == output.lease_id:
            last = last._replace(upto=completion.sequence_number)
            continue
        if last is not None:
            yield last
        last = Batch(output, completion.sequence_number)
    if last is not None:
        yield last


def files_of(fs: Any, base: str, batch: Batch) -> list[ParquetFile]:
    """The files of a batch: the one it points to or, where a writer such as Spark made a folder, those in there."""
    published = batch.published
    if not published.path.endswith(".parquet"):
        raise FilesWrong(
            f"{published.uri} was published as {published.format}, and Iceberg tables are made of parquet; have "
            f"{published.subject} return a data frame or an Arrow table"
        )
    root = f"{base}/{published.path}"
    try:
        infos = fs.find(root, detail=True) if fs.isdir(root) else {root: fs.info(root)}
    except FileNotFoundError:
        infos = {}
    named = {path: int(info["size"]) for path, info in infos.items() if _is_data(path, root)}
    if not named:
        raise FilesWrong(
            f"{published.uri} was published under number {published.sequence_number} and is not there: has base_path "
            "changed without its files being moved along, or were files removed by hand?"
        )
    return [
        ParquetFile(batch, path, fs.unstrip_protocol(path), size, _values(path.removeprefix(root)))
        for path, size in sorted(named.items())
    ]


def _is_data(path: str, root: str) -> bool:
    inner = path.removeprefix(root).split("/")
    return path.endswith(".parquet") and not any(part.startswith(("_", ".")) for part in inner if "=" not in part)


def _values(inner: str) -> dict[str, str | None]:
    pairs = [part.split("=", 1) for part in inner.split("/")[:-1] if "=" in part]
    return {unquote(name): None if value == _NULL_PARTITION else unquote(value) for name, value in pairs}
