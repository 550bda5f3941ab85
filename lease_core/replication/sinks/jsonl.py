"""Events in files: JSON lines, sealed batch by batch and forced to disk."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from urllib.parse import quote, unquote

from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent
from lease_core.replication.batch import Batch
from lease_core.replication.durable_file import force_folder, make_folder, replace_file, room_in
from lease_core.replication.errors import CorruptCopy, SinkUnavailable
from lease_core.replication.paged import Line, Paged, PagedLines
from lease_core.replication.same_event import check_last
from lease_core.replication.sealed import Block, Seal, Torn, blocks, next_seal, owner_in

_SUFFIX = ".jsonl"
_BEYOND = 1 << 62  # above every number
_LONGEST_NAME = 255  # bytes, of a file or folder; a character of a namespace may take nine or twelve
_APPENDING = os.O_WRONLY | os.O_APPEND
_force = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter


class JsonlSink:
    """Appends to files in a folder of ``path`` named after the namespace, one writer at a time.

    A batch is there once its seal is on disk. What a crash left unsealed is cut off when the sink is opened again, and
    comes again. A file that has grown to ``max_bytes`` is followed by another, named after its first event.
    ``fsync=False`` leaves forcing to the operating system: faster, and a power failure may then take acknowledged
    events, which come again only as long as the source has them.
    """

    sealed = True
    compares = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        name: str = "jsonl",
        *,
        max_bytes: int = 64 * 1024 * 1024,
        fsync: bool = True,
    ) -> None:
        if max_bytes < 1:
            raise InvalidInput("max_bytes", f"must be at least 1 (got {max_bytes})")
        self.name = name
        self._path, self._max_bytes, self._fsync = Path(path), max_bytes, fsync
        self._writers: dict[str, _Writer] = {}
        self._lock = threading.Lock()

    def deliver(self, batch: Batch) -> None:
        self.take(batch)
        self.settle()

    def take(self, batch: Batch) -> None:
        """Append the batch and leave forcing it to ``settle``."""
        with self._lock, room_in(self._path):
            writer = self._writer(batch.namespace)
            check_last(batch, writer.position, writer.event)
            rest = batch.after(writer.position)
            if rest is None:
                return
            try:
                writer.append(rest)
            except BaseException:  # half of it may be in the file: opening it again cuts that off
                self._writers.pop(batch.namespace).close()
                raise

    def settle(self) -> None:
        """Force to disk what was appended. What it does not take is cut off again, and comes again."""
        with self._lock, room_in(self._path):
            for namespace, writer in list(self._writers.items()):
                try:
                    writer.force()
                except BaseException:
                    self._writers.pop(namespace).close()
                    raise

    def position(self, namespace: str) -> int | None:
        with self._lock, room_in(self._path):
            return self._writer(namespace).position

    def close(self) -> None:
        with self._lock:
            while self._writers:
                self._writers.popitem()[1].close()

    def _writer(self, namespace: str) -> _Writer:
        if namespace not in self._writers:
            folder = self._path / folder_name(namespace)
            writer = self._writers[namespace] = _Writer(folder, self._max_bytes, self._fsync)
            try:
                writer.open()
            except BaseException:  # an interrupt, say: a lock that nobody knows of would be held for ever
                self._writers.pop(namespace).close()
                raise
        return self._writers[namespace]


def folder_name(namespace: str) -> str:
    """The namespace as one part of a path, whatever is in it; a long one ends with a digest instead."""
    quoted = quote(namespace, safe="")
    if len(quoted) > _LONGEST_NAME:
        return f"{quoted[: _LONGEST_NAME - 33]}~{hashlib.sha256(namespace.encode()).hexdigest()[:32]}"
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def is_short_for_another(folder: str) -> bool:
    """Whether a folder does not have all of its namespace's name."""
    return len(folder) == _LONGEST_NAME and folder[-33] == "~"


def read_jsonl(path: str | os.PathLike[str], namespace: str | None = None) -> JsonlCopy:
    """The copy that a ``JsonlSink`` keeps at ``path``. ``namespace`` is needed if there are several."""
    root = Path(path)
    folders = sorted(each.name for each in root.iterdir() if each.is_dir()) if root.is_dir() else []
    found = [unquote(each) for each in folders]
    if namespace is None:
        if len(found) != 1 or is_short_for_another(folders[0]):
            raise InvalidInput("namespace", f"{root} has {', '.join(found) or 'no copy in it'}: say which to read")
        namespace = found[0]
    elif folder_name(namespace) not in folders:
        raise InvalidInput("namespace", f"{root} has no copy of {namespace}, but {', '.join(found) or 'nothing'}")
    return JsonlCopy(root / folder_name(namespace), namespace)


class JsonlCopy:
    """A source that reads what a ``JsonlSink`` wrote, also while it writes, and checks every seal."""

    def __init__(self, folder: Path, namespace: str) -> None:
        self.namespace = namespace
        self._folder = folder
        self.events = Paged(self.read).events
        self.event_payload = PagedLines(self._read_lines).event_payload

    @property
    def queue_id(self) -> str | None:
        """The queue whose log this is, if the copy says so."""
        return owner_in(self.seals())

    def read(self, after: int = 0, *, strict: bool = False) -> Iterator[LeaseEvent]:
        """The events above ``after``. Raises ``CorruptCopy`` at the first that is damaged, after all before it.

        An unsealed end is a batch still being written, and left out; with ``strict`` it is damage like any other.
        """
        for place, block in self._blocks(after, strict):
            if block.seal.last > after:
                yield from (event for event in block.events(place) if event.sequence_number > after)

    def _read_lines(self, after: int) -> Iterator[Line]:
        for place, block in self._blocks(after, strict=False):
            if block.seal.last > after:
                yield from (line for line in block.lines(place) if line.sequence_number > after)

    def seals(self, after: int = 0, *, strict: bool = False) -> Iterator[Seal]:
        """The seals of the batches that end above ``after``, checked but not decoded."""
        return (block.seal for _, block in self._blocks(after, strict) if block.seal.last > after)

    def last(self) -> int | None:
        """The number of the last event that is sealed, by the last file alone; none if it has none."""
        found = deque(self._blocks(_BEYOND, strict=False), maxlen=1)
        return found[0][1].seal.last if found else None

    def _blocks(self, after: int, strict: bool) -> Iterator[tuple[str, Block]]:
        files = _files(self._folder)
        begin = max((index for index, file in enumerate(files) if _first(file) <= after + 1), default=0)
        before: Seal | None = None
        for file in files[begin:]:
            good = before.last if before else _first(file) - 1
            try:
                for block in blocks(file.read_bytes(), file.name, before, good):
                    before = block.seal
                    yield file.name, block
            except Torn as torn:
                if strict or file != files[-1]:
                    good = torn.before.last if torn.before else good
                    raise CorruptCopy(file.name, str(torn), good) from None


class _Writer:
    """The open end of one copy. Holds a lock on its folder, so that two relays never write into each other."""

    def __init__(self, folder: Path, max_bytes: int, fsync: bool) -> None:
        self._folder, self._max_bytes, self._fsync = folder, max_bytes, fsync
        self._last: Seal | None = None
        self._file: int | None = None
        self._lock: FileIO | None = None  # an object, which lets go of the lock with the last who knows of it
        self._size = self._forced = 0

    def open(self) -> None:
        """Take the lock, and go to the end of what is there."""
        make_folder(self._folder)
        force_folder(self._folder.parent)  # who made the folder may have been killed before
        self._lock = FileIO(self._folder / ".lock", "a+")
        _lock(self._lock.fileno(), self._folder)
        self._resume()

    @property
    def position(self) -> int:
        return self._last.last if self._last else 0

    def event(self, number: int) -> LeaseEvent | None:
        """One of the events that are there."""
        namespace = unquote(self._folder.name)
        return next(JsonlCopy(self._folder, namespace).read(number - 1), None)

    def append(self, batch: Batch) -> None:
        made = next_seal(batch, self._last)
        if self._file is None or self._size >= self._max_bytes:
            self._begin_file(batch.first)
        assert self._file is not None
        try:
            self._size += _write(self._file, batch.payload, made.line())
        except OSError:
            with suppress(OSError):  # a disk that is full is not kept full by half a batch
                os.ftruncate(self._file, self._size)
            raise
        self._last = made

    def force(self) -> None:
        """Force the file to disk. If that fails all since the last time is cut off.

        The system may forget what it could not write and say the next time that all is well; read from its cache, it
        would be believed.
        """
        if self._file is None or not self._fsync or self._forced == self._size:
            return
        try:
            _force(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._forced)
            raise
        self._forced = self._size

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)
        if self._lock is not None:
            self._lock.close()

    def _resume(self) -> None:
        """Go to the last seal, cutting off what comes after it."""
        for file in reversed(_files(self._folder)):
            data = file.read_bytes()
            end = 0
            with suppress(Torn):
                for block in blocks(data, file.name, None, _first(file) - 1):
                    self._last, end = block.seal, block.end
            if end < len(data):  # nobody was told that it is here; yet it may be evidence, so it is set aside
                replace_file(file.with_suffix(".torn"), data[end:])
            if not end:
                file.unlink()
                force_folder(self._folder)
                continue
            os.truncate(file, end)
            self._file = os.open(file, _APPENDING)
            self._size = self._forced = end
            os.fsync(self._file)
            return

    def _begin_file(self, first: int) -> None:
        if self._file is not None:
            self.force()
            file, self._file = self._file, None  # closed once: by then its number may be that of another's file
            os.close(file)
        path = self._folder / f"{first:020d}{_SUFFIX}"
        self._file = os.open(path, _APPENDING | os.O_CREAT | os.O_EXCL, 0o644)
        self._size = self._forced = 0
        force_folder(self._folder)


def _write(descriptor: int, payload: bytes, seal: bytes) -> int:
    """Write both, in one call if the system takes them in one. Gives how many bytes that were."""
    size = len(payload) + len(seal)
    written = os.writev(descriptor, (payload, seal))
    if written < size:
        view = memoryview(payload + seal)[written:]
        while view:
            view = view[os.write(descriptor, view) :]
    return size


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SinkUnavailable(f"another relay writes to {folder.name}") from None


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob(f"*{_SUFFIX}") if file.stem.isdecimal())


def _first(file: Path) -> int:
    return int(file.stem)
