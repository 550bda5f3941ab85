"""Files that are still there after the power went: written, forced to disk, and so is the folder that names them."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lease_core.replication.errors import SinkUnavailable

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def force_folder(folder: Path) -> None:
    """Force the names in a folder to disk: a new file is only safe once its name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder, and those that it is in, where they are missing: each is only safe once its name is."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    force_folder(folder.parent)


@contextmanager
def room_in(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Say what to do about a full disk, rather than which system call met it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise SinkUnavailable(no_room_left(f"in {os.fspath(folder)}")) from None


def no_room_left(where: str) -> str:
    return f"no space is left {where}: free some. Nothing is lost, the events wait in the log and come then"


def place_file(path: Path, content: bytes) -> None:
    """Make a file with this content where there is none; raises ``FileExistsError``. Nobody ever sees half of it.

    Its content is safe then, its name only after ``force_folder``: who places several forces their folder once.
    """
    try:
        _place(path, content)
    except FileNotFoundError:
        make_folder(path.parent)
        _place(path, content)


def _place(path: Path, content: bytes) -> None:
    if not _place_unnamed(path, content):
        _place_named(path, content)


def _place_unnamed(path: Path, content: bytes) -> bool:
    """By way of a file without a name, forced as it is written: fewer steps, and a crash leaves nothing behind.

    Gives False where the system has no such files.
    """
    try:
        descriptor = os.open(path.parent, os.O_WRONLY | os.O_TMPFILE | os.O_DSYNC, 0o666)
    except (AttributeError, OSError):
        return False
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        # src_dir_fd does not matter for an absolute path, but without one Python links the link rather than the file
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)
    except FileNotFoundError:  # no /proc
        return False
    finally:
        os.close(descriptor)
    return True


def _place_named(path: Path, content: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Give the file new content, all of it or none."""
    make_folder(path.parent)
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    force_folder(path.parent)
