"""Where the tests' Sparks live, and what their Javas are told."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

# Every Java that a test starts lives for a minute or two: compiling well would take longer than what it gains.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

HOME = Path(sys.prefix).resolve() / "spark-home"


def spark_home() -> Path:
    """A home of links into the wheel: the standalone workers of a ``local-cluster`` put their own files into it."""
    wheel = Path(str(files("pyspark"))).resolve()
    HOME.mkdir(exist_ok=True)
    for name in ("jars", "bin", "sbin", "python"):
        with suppress(FileExistsError):
            (HOME / name).symlink_to(wheel / name)
    return HOME


def tidy_home() -> None:
    """Remove what standalone workers have left in the home."""
    shutil.rmtree(HOME / "work", ignore_errors=True)
