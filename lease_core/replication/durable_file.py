"""Files that are still there after the power went: written, forced to disk, and so is the folder that names them."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def force_folder(folder: Path) -> None:
    """Force the names in a folder to disk: a new file is only safe once its name is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
