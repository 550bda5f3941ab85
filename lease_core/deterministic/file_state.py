"""State in a folder: one readable JSON file per key, named by the SHA-256 of the key.

A value is written to a temporary file, flushed to disk, and then put in its place in one step, with the folder flushed
after it: a crash leaves the old value, the new one, or none, never half of one. Writers of a key take turns by a lock
that the kernel lets go of when its holder dies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from lease_core.deterministic.state import Fence, StateStore
from lease_core.errors import InvalidInput, StoreBusy, StoreError, StoreFull, StoreReadOnly, StoreUnavailable

_log = logging.getLogger(__name__)

_STRIPES = 256  # locks are shared by keys, so that they need not be made and removed
_STALE_SECONDS = 3_600.0
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FileStateStore(StateStore):
    """For one machine, or a file system whose ``flock`` reaches all machines that share it."""

    def __init__(self, folder: str | os.PathLike[str], timeout: float = 10.0) -> None:
        self.folder = Path(folder).absolute()
        self._timeout = timeout
        with _translated():
            for part in ("values", "fences", "locks"):
                _make_folder(self.folder / part)
            self._clear_leftovers()

    def __repr__(self) -> str:
        return f"FileStateStore({str(self.folder)!r})"

    def path(self, key: str) -> Path:
        """The file that holds ``key``."""
        return self._path("values", key)

    def _path(self, part: str, key: str) -> Path:
        digest = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / part / digest[:2] / f"{digest}.json"

    def _read(self, key: str) -> bytes | None:
        with _translated():
            found = _load(self.path(key), "key", key)
            if not isinstance(found, _Torn):
                return None if found is None else _value(found)
            with self._locked("values", key):
                return self._read_locked(key)

    def _read_locked(self, key: str) -> bytes | None:
        """With the key's lock held, a torn file can be moved out of the way: nobody is putting a whole one there."""
        found = _load(self.path(key), "key", key)
        if isinstance(found, _Torn):
            aside = self.path(key).with_suffix(f".torn-{secrets.token_hex(4)}")
            os.rename(self.path(key), aside)
            _flush_folder(aside.parent)
            _log.warning("the value of %r was torn (%s): it is treated as absent, and kept in %s", key, found, aside)
            return None
        return None if found is None else _value(found)

    def _write(self, key: str, raw: bytes, fence: Fence | None) -> None:
        with self._writing(key, fence):
            _place(self.path(key), {"key": key, "value": msgspec.Raw(raw)}, replace=True)

    def _insert(self, key: str, raw: bytes, fence: Fence | None) -> tuple[bytes, bool]:
        with self._writing(key, fence):
            there = self._read_locked(key)
            if there is not None:
                return there, False
            _place(self.path(key), {"key": key, "value": msgspec.Raw(raw)}, replace=False)
            return raw, True

    def _delete(self, key: str) -> bool:
        with self._writing(key, None):
            try:
                self.path(key).unlink()
            except FileNotFoundError:
                return False
            _flush_folder(self.path(key).parent)
            return True

    def _claim(self, fence: Fence) -> None:
        with _translated(), self._locked("fences", fence.scope):
            self._claim_locked(fence)

    def _claim_locked(self, fence: Fence) -> None:
        path = self._path("fences", fence.scope)
        found = _load(path, "scope", fence.scope)
        if isinstance(found, _Torn):
            raise StoreError(
                f"the fence of {fence.scope!r} in {path} is torn ({found}), so that nobody can say which holder is "
                f"the newest: end the lease on item {fence.token.sequence_id}, then remove that file"
            )
        seen = -1 if found is None else int(found["fence"])
        if seen > fence.number:
            raise fence.refusal(seen)
        if seen < fence.number:
            _place(path, {"scope": fence.scope, "fence": fence.number}, replace=True)

    @contextmanager
    def _writing(self, key: str, fence: Fence | None) -> Iterator[None]:
        """The locks for one write. A fence's always comes first, so that no two writers wait for each other."""
        with _translated(), ExitStack() as stack:
            if fence is not None:
                stack.enter_context(self._locked("fences", fence.scope))
                self._claim_locked(fence)
            stack.enter_context(self._locked("values", key))
            yield

    @contextmanager
    def _locked(self, part: str, key: str) -> Iterator[None]:
        stripe = hashlib.sha256(key.encode()).digest()[0] % _STRIPES
        handle = os.open(self.folder / "locks" / f"{part}-{stripe:02x}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + self._timeout
            while not _try_lock(handle):
                if time.monotonic() > deadline:
                    raise StoreBusy(
                        f"another process held {key!r} for {self._timeout:g} s. Nothing was written; repeat the call"
                    )
                time.sleep(random.uniform(0.0005, 0.003))
            yield
        finally:
            os.close(handle)

    def _clear_leftovers(self) -> None:
        """Remove temporary files that crashed writers have left."""
        for leftover in self.folder.glob("*/*/*.tmp"):
            with suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                    leftover.unlink()


class _Torn(str):
    """Why a file cannot be read."""


def _load(path: Path, name: str, key: str) -> dict[str, Any] | _Torn | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        return _Torn(error)
    if document.get(name) != key or len(document) != 2:
        return _Torn(f"it is not about {key!r}")
    return document


def _value(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document["value"])


def _place(path: Path, document: dict[str, Any], *, replace: bool) -> None:
    """Put a document in its place, whole and for good."""
    _make_folder(path.parent)
    temporary = path.with_name(f"{path.stem}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
        _flush_folder(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name, which must be free: a link, unlike a rename, never replaces."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(temporary, path)  # no links on this file system: the lock has to do


def _make_folder(folder: Path) -> None:
    """Make a folder, and those that it is in, where they are missing, with their names flushed to disk."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                raise StoreFull(f"no space is left for state ({error}). Nothing was written") from error
            case errno.EACCES | errno.EROFS | errno.EPERM:
                raise StoreReadOnly(f"the folder cannot be written ({error}): check its permissions") from error
            case errno.ENOTDIR | errno.EEXIST:
                raise InvalidInput("url", f"must name a folder ({error})") from error
        raise StoreUnavailable(f"the folder cannot be used ({error})") from error
