"""Folders named after leases: where outputs are written, and what may be removed again."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import quote

import dagster as dg
from fsspec.implementations.local import LocalFileSystem

from lease_core import LeaseQueue
from lease_core.errors import EventsPruned
from lease_core.model import EventType

_LEASE_FOLDER = re.compile(r"(?:omnirelay_lease=)?([0-9a-f]{32})-([0-9]{1,19})")


MOST_LEASES = 100_000


class Removed(NamedTuple):
    """A folder that ``vacuum`` removed, or would remove: written under a lease that never published it."""

    uri: str
    lease_id: str
    fence: int
    bytes: int


def folder_of(parts: Iterable[str], partition: str | None, lease: str, *, by_columns: bool = False) -> str:
    """Where an output goes, relative to the base: {asset key}/{partition or _}/{lease id}-{fence}.

    If the output is itself partitioned ``by_columns``, readers take the names of folders for columns, and find only
    outputs with the same columns: then both folders have the form name=value.
    """
    where = "_" if partition is None else "%5F" if partition == "_" else _escaped(partition)
    names = ("omnirelay_partition=", "omnirelay_lease=") if by_columns else ("", "")
    return "/".join([*map(_escaped, parts), names[0] + where, names[1] + lease])


def _escaped(name: str) -> str:
    """One path segment out of any text: no separators, no way up, nothing a filesystem finds too long.

    It need not be undone, as the log has the names; but what people see in a listing should be readable.
    """
    safe = quote(name, safe="", errors="replace").replace("~", "%7E")
    if _LEASE_FOLDER.fullmatch(safe):
        safe = safe.replace("-", "%2D")
    if not safe.strip("."):
        safe = safe.replace(".", "%2E") or "%"
    if len(safe) > 120:
        safe = f"{safe[:80]}~{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:32]}"
    return safe


def settle(fs: Any, base: str, folder: str) -> None:
    """Have the disk keep what was written before the log says that it is there. Object stores do so by themselves."""
    if not isinstance(fs, LocalFileSystem):
        return
    for file in fs.find(f"{base}/{folder}"):
        _sync(file)
    parts = folder.split("/")
    above = [f"{base}/{'/'.join(parts[:depth])}" for depth in range(len(parts), 0, -1)]
    for each in (*above, base, os.path.dirname(base)):
        with suppress(PermissionError):  # a folder that may not be listed was not made by us
            _sync(each)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lease_folders(fs: Any, base: str) -> dict[str, dict[str, int]]:
    """Every folder in the layout of ``folder_of``, relative to the base, with its files and their sizes."""
    folders: dict[str, dict[str, int]] = {}
    fs.invalidate_cache()
    for path, info in fs.find(base or "/", withdirs=True, detail=True).items():
        parts = path.removeprefix(base).strip("/").split("/")
        at = next((n for n, part in enumerate(parts) if n >= 2 and _LEASE_FOLDER.fullmatch(part)), None)
        if at is not None and path.startswith(f"{base}/"):
            files = folders.setdefault("/".join(parts[: at + 1]), {})
            if info["type"] != "directory":
                files[path] = int(info["size"] or 0)
    return folders


def lease_of(folder: str) -> tuple[str, int]:
    match = _LEASE_FOLDER.fullmatch(folder.rpartition("/")[2])
    assert match is not None
    return match[1], int(match[2])


def leases_held(queue: LeaseQueue) -> set[str]:
    """The ids of all leases that anybody holds, also of those which ran out unnoticed."""
    leases = queue.leases(MOST_LEASES, bodies=False)
    if len(leases) == MOST_LEASES:
        raise dg.DagsterInvariantViolationError(
            f"{MOST_LEASES} or more items are leased right now, too many to tell whose files are in use; "
            "vacuum when the queue is less busy"
        )
    return {lease.token.lease_id for lease in leases}


def granted_before(queue: LeaseQueue, lease_id: str, fence: int, age: timedelta) -> bool:
    """Whether this queue's log says so: at number ``fence`` the lease was granted, and that was long enough ago."""
    try:
        events = queue.events(fence - 1, 1) if 0 < fence < 2**63 else []
    except EventsPruned:
        return False
    return any(
        event.sequence_number == fence
        and event.type == EventType.LEASE_GRANTED
        and event.token is not None
        and event.token.lease_id == lease_id
        and queue.now() - event.timestamp >= age
        for event in events
    )


def remove(fs: Any, folder: str, files: Mapping[str, int]) -> None:
    """Remove the files that were looked at, one by one and by their exact names, then the folders they leave empty."""
    for file in files:
        with suppress(FileNotFoundError):  # another vacuum was faster
            fs.rm_file(file)
    inner = sorted({file.rpartition("/")[0] for file in files} | {folder}, key=len, reverse=True)
    for each in inner:
        with suppress(OSError, NotImplementedError):  # object stores have no folders
            fs.rmdir(each)
