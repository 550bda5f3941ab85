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
    """Make a file with this content where there is none; raises ``FileExistsError``. Nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with fresh.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    force_folder(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Give the file new content, all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    force_folder(path.parent)
