"""Events in an object store: immutable sealed segments on local disk, S3, GCS or Azure."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.durable_file import force_folder, make_folder, place_file, room_in
from lease_core.replication.errors import CorruptCopy, SinkUnavailable
from lease_core.replication.paged import Line, Paged, PagedLines
from lease_core.replication.same_event import check_last
from lease_core.replication.sealed import Block, Seal, Torn, blocks, owner_in, seal
from lease_core.replication.sinks.jsonl import folder_name, is_short_for_another

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SUFFIX = ".jsonl"
_UNFORCED = 8  # names at most that a relay leaves unforced for a moment


class ObjectStoreSink:
    """Writes each batch as one object, ``<namespace>/<first event, 20 digits>.jsonl`` below the URL's path.

    Objects are put only where there is none and never changed. As each begins where the one before it ends, two relays
    that write at once make one chain: the slower one finds the object there and goes on after it. How far the copy
    reaches is read from the store itself. On local disk the names of several new objects are forced at the cost of one,
    and none of them counts before. ``options`` go to the store: for S3 ``region``, ``endpoint``,
    ``access_key_id`` and so on; what is left out comes from the environment.
    """

    sealed = True
    compares = True
    linger = 5.0  # many small objects cost more than a little lag

    def __init__(
        self,
        url: str,
        name: str = "objects",
        *,
        options: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._store = open_object_store(url, options, client_options)
        self._ends: dict[str, Seal | None] = {}
        self._unforced: dict[str, Path] = {}
        self._forced: set[str] = set()
        self.settles = folder_of(self._store, "") is not None  # elsewhere what was put is there for good
        self._lock = threading.Lock()

    def deliver(self, batch: Batch) -> None:
        self.take(batch)
        self.settle()

    def take(self, batch: Batch) -> None:
        """Put the batch; on local disk, leave forcing its name to ``settle``."""
        from obstore.exceptions import AlreadyExistsError

        with self._lock, without_secrets():
            rest: Batch | None = batch
            copy = SegmentsCopy(self._store, batch.namespace)
            check_last(batch, self._position(batch.namespace), lambda number: next(copy.read(number - 1), None))
            while rest := rest and rest.after(self._position(batch.namespace)):
                if folder := folder_of(self._store, batch.namespace):
                    self._unforced[batch.namespace] = folder
                data, made = seal(rest, self._ends[batch.namespace])
                try:
                    put_new(self._store, key_of(batch.namespace, rest.first), data)
                except (
                    AlreadyExistsError,
                    FileExistsError,
                ):  # another relay, or this one before its answer was lost: go on after that
                    self._ends[batch.namespace] = self._seal_at(key_of(batch.namespace, rest.first))
                except BaseException:
                    self._ends.pop(batch.namespace)
                    raise
                else:
                    self._ends[batch.namespace] = made

    def settle(self) -> None:
        """Force the names of objects to disk that were put since the last time, by this relay or another."""
        with self._lock:
            for namespace, folder in list(self._unforced.items()):
                del self._unforced[namespace]
                try:
                    self._force(namespace, folder)
                except BaseException:  # the folder may be gone, even: look what is there before anything is counted
                    self._ends.pop(namespace, None)
                    raise

    def _force(self, namespace: str, folder: Path) -> None:
        with room_in(folder):
            force_folder(folder)
            if namespace not in self._forced:  # who made the folder may have been killed before its name was safe
                force_folder(folder.parent)
                self._forced.add(namespace)

    def position(self, namespace: str) -> int | None:
        with self._lock, without_secrets():
            self._ends.pop(namespace, None)
            return self._position(namespace)

    def _position(self, namespace: str) -> int:
        if namespace not in self._ends:
            listed = keys(self._store, namespace)
            folder = folder_of(self._store, namespace)
            if folder is None or not listed:
                self._ends[namespace] = self._seal_at(listed[-1]) if listed else None
            else:
                self._force(namespace, folder)  # another process may have put what was seen there, and not forced it
                self._ends[namespace] = self._chained(listed[-_UNFORCED - 1 :])
        end = self._ends[namespace]
        return end.last if end else 0

    def _chained(self, listed: list[str]) -> Seal | None:
        """The last of some seals, each of which follows the one before.

        Names that were not forced when the power went are not lost in order, on some file systems: what was to come
        before the last one may be missing.
        """
        before: Seal | None = None
        for key in listed:
            before = segment(self._store, key, before).seal
        return before

    def _seal_at(self, key: str) -> Seal:
        return segment(self._store, key).seal


@contextmanager
def without_secrets() -> Iterator[None]:
    """A store's errors may show the address of a request, and in its query a signature."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        raise SinkUnavailable(_said(error)) from None


@contextmanager
def _reading() -> Iterator[None]:
    """The same around what reads a copy. A store that is away may come back, as a database may."""
    from obstore.exceptions import BaseError

    try:
        yield
    except BaseError as error:
        advice = "check its address, the credentials and the network"
        raise StoreUnavailable(f"the copy's object store cannot be read ({_said(error)}): {advice}") from None


def _said(error: Exception) -> str:
    """The first line, without the query of an address and whoever is named in it; the library adds pages."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: " + re.sub(r"//[^/\s@]+@", "//...@", re.sub(r"\?[^\s\"')]+", "?...", line))[:300]


def open_object_store(
    url: str, options: Mapping[str, Any] | None = None, client_options: Mapping[str, Any] | None = None
) -> ObjectStore:
    """The store that ``url`` names: ``file:///path``, ``s3://bucket/path``, ``gs://``, ``az://``."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise InvalidInput(
            "url", f"object stores need obstore ({error}); pip install 'omnirelay-dagster[objectstore]'"
        ) from error
    if not isinstance(url, str):
        raise InvalidInput("url", f"must be text such as s3://bucket/path, not {type(url).__name__}")
    try:
        if url.startswith("file://"):
            folder = unquote(url.removeprefix("file://"))
            with suppress(OSError):  # which the library names better
                make_folder(Path(folder))
            return LocalStore(folder, mkdir=True)
        return from_url(url, config=dict(options or {}), client_options=dict(client_options or {}))  # type: ignore[call-overload, no-any-return]
    except BaseException as error:
        # the library panics over some options, with what is no Exception
        if not isinstance(error, BaseError | ValueError | OSError) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInput(
            "url",
            f"cannot be opened with these options ({type(error).__name__}): check it, the options and the environment",
        ) from None


def key_of(namespace: str, first: int) -> str:
    return f"{folder_name(namespace)}/{first:020d}{_SUFFIX}"


def put_new(store: ObjectStore, key: str, data: bytes) -> None:
    """Put an object where there is none, durably but for the name of a local file. Raises if there is one."""
    import obstore
    from obstore.store import LocalStore

    if isinstance(store, LocalStore) and store.prefix is not None:
        with room_in(store.prefix):
            place_file(Path(store.prefix) / key, data)  # the library leaves a local file to the system's cache
    else:
        obstore.put(store, key, data, mode="create")


def folder_of(store: ObjectStore, namespace: str) -> Path | None:
    """The folder in which names must be forced to disk, if the store is one of files."""
    from obstore.store import LocalStore

    if isinstance(store, LocalStore) and store.prefix is not None:
        return Path(store.prefix) / folder_name(namespace)
    return None


def keys(store: ObjectStore, namespace: str) -> list[str]:
    """The keys of all segments of the namespace, in order."""
    import obstore

    prefix = folder_name(namespace)
    found = (each["path"] for chunk in obstore.list(store, prefix=prefix) for each in chunk)
    return sorted(key for key in found if key.endswith(_SUFFIX) and _number(key) is not None)


def segment(store: ObjectStore, key: str, before: Seal | None = None) -> Block:
    """The segment at ``key``, checked against its seal and the one before it."""
    import obstore

    first = _number(key) or 1
    good = before.last if before else first - 1
    place = key.rpartition("/")[2]
    try:
        found = list(blocks(bytes(obstore.get(store, key).bytes()), place, before, good))
    except Torn:
        raise CorruptCopy(place, "is cut off or damaged", good) from None
    if len(found) != 1 or found[0].seal.first != first:
        raise CorruptCopy(place, "does not hold the batch that its name says", good)
    return found[0]


def _number(key: str) -> int | None:
    stem = key.rpartition("/")[2].removesuffix(_SUFFIX)
    return int(stem) if stem.isdecimal() else None


def read_segments(
    url: str,
    namespace: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    client_options: Mapping[str, Any] | None = None,
) -> SegmentsCopy:
    """The copy that an ``ObjectStoreSink`` keeps at ``url``. ``namespace`` is needed if there are several."""
    store = open_object_store(url, options, client_options)
    if namespace is None:
        import obstore

        with _reading():
            below = obstore.list_with_delimiter(store)["common_prefixes"]
        folders = sorted(each.rpartition("/")[2] for each in below)
        found = [unquote(each) for each in folders]
        if len(found) != 1 or is_short_for_another(folders[0]):
            raise InvalidInput("namespace", f"there is {', '.join(found) or 'no copy'} at the url: say which to read")
        namespace = found[0]
    return SegmentsCopy(store, namespace)


class SegmentsCopy:
    """A source that reads the segments of one namespace and checks every seal, and that none is missing."""

    def __init__(self, store: ObjectStore, namespace: str) -> None:
        self.namespace = namespace
        self._store = store
        self.events = Paged(self.read).events
        self.event_payload = PagedLines(self._read_lines).event_payload

    @property
    def queue_id(self) -> str | None:
        """The queue whose log this is, if the copy says so."""
        return owner_in(self.seals())

    def read(self, after: int = 0) -> Iterator[LeaseEvent]:
        """The events above ``after``. Raises ``CorruptCopy`` at the first that is damaged, after all before it."""
        for key, block in self._segments(after):
            if block.seal.last > after:
                yield from (event for event in block.events(key) if event.sequence_number > after)

    def _read_lines(self, after: int) -> Iterator[Line]:
        for key, block in self._segments(after):
            if block.seal.last > after:
                yield from (line for line in block.lines(key) if line.sequence_number > after)

    def seals(self, after: int = 0) -> Iterator[Seal]:
        """The seals of the segments that end above ``after``, checked but not decoded."""
        return (block.seal for _, block in self._segments(after) if block.seal.last > after)

    def first(self) -> int | None:
        """The number of the first event, by the name of the first segment; none if there is no segment."""
        return min((_number(key) or 1 for key in self._keys()), default=None)

    def _segments(self, after: int) -> Iterator[tuple[str, Block]]:
        listed = self._keys()
        begin = max((index for index, key in enumerate(listed) if (_number(key) or 0) <= after + 1), default=0)
        before: Seal | None = None
        for key in listed[begin:]:
            with _reading():
                block = segment(self._store, key, before)
            before = block.seal
            yield key, block

    def _keys(self) -> list[str]:
        with _reading():
            return keys(self._store, self.namespace)
