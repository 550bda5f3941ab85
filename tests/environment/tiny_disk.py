"""A file system of a few mebibytes that can be filled to the last byte, in a name space of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'


def on_a_tiny_disk(module: str, scenario: str, folder: Path, size: str = "4m") -> None:
    """Run ``python -m module SCENARIO DISK FOLDER``, with DISK a new file system of ``size``, and see it succeed."""
    disk = folder / "disk"
    disk.mkdir()
    probe = ["sh", "-c", f"mount -t tmpfs tmpfs {disk}"]
    if not shutil.which("unshare") or subprocess.run([*UNSHARE, *probe], capture_output=True).returncode:
        pytest.skip("no file systems may be mounted here")
    program = [sys.executable, "-m", module, scenario, str(disk), str(folder)]
    mounted = [*UNSHARE, "sh", "-c", MOUNT, "sh", size, str(disk), *program]
    done = subprocess.run(mounted, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4_000:]


class Ballast:
    """A file that takes all the room there is, and gives it back."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "ballast"

    def fill(self, leave: int = 0) -> None:
        """Take everything but ``leave`` bytes."""
        with self._path.open("ab") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), b"." * 4096)
        os.truncate(self._path, max(0, self._path.stat().st_size - leave))

    def release(self) -> None:
        self._path.unlink()
