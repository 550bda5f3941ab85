"""Removing what no snapshot needs: manifests of expired snapshots, and what committers that died left behind.

Only files inside the table's own folder are ever looked at, and only such as a committer writes there. The data files
that leases published lie elsewhere and belong to the log, which still names them.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from pyiceberg.io.pyarrow import PyArrowFileIO

from lease_core.errors import InvalidInput

if TYPE_CHECKING:
    from pyiceberg.table import Table

_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_METADATA = re.compile(rf"({_UUID}-m\d+\.avro|snap-\d+-\d+-{_UUID}\.avro|\d+-{_UUID}\.metadata\.json)")
_DATA = re.compile(rf"\d+-\d+-{_UUID}\.parquet")


def orphans(table: Table, older_than: timedelta) -> list[str]:
    """Addresses in the table's folder that nothing refers to, and that were there for longer than ``older_than``."""
    from pyarrow.fs import FileSelector, FileType

    scheme, host, root = PyArrowFileIO.parse_location(table.metadata.location)
    fs = _arrow_io(table).fs_by_scheme(scheme, host)
    start = table.metadata.location[: -len(root.removeprefix(host))] if root else table.metadata.location
    written = [
        info.path
        for info in fs.get_file_info(FileSelector(root, allow_not_found=True, recursive=True))
        if info.type == FileType.File
        and _is_ours(info.path.removeprefix(root).strip("/"))
        and datetime.now(UTC) - info.mtime > older_than
    ]
    if not written:
        return []
    # Looked at last, and afresh: whatever was committed since the listing counts as referred to.
    needed = {PyArrowFileIO.parse_location(address)[2] for address in _referred(table.refresh())}
    return [f"{start}{path.removeprefix(host)}" for path in written if path not in needed]


def _arrow_io(table: Table) -> PyArrowFileIO:
    if not isinstance(table.io, PyArrowFileIO):
        raise InvalidInput("table", f"{type(table.io).__name__} cannot list files; open the catalog with PyArrowFileIO")
    return table.io


def referred_data(table: Table) -> set[str]:
    """The addresses of the data files of all snapshots."""
    seen: set[str] = set()
    needed: set[str] = set()
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                needed |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
    return needed


def _is_ours(inner: str) -> bool:
    folder, _, name = inner.rpartition("/")
    if folder == "metadata":
        return bool(_METADATA.fullmatch(name))
    return folder.split("/")[0] == "data" and bool(_DATA.fullmatch(name))


def _referred(table: Table) -> set[str]:
    metadata = table.metadata
    needed = {table.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    for snapshot in metadata.snapshots:
        needed.add(snapshot.manifest_list)
        needed |= {manifest.manifest_path for manifest in snapshot.manifests(table.io)}
    return needed | referred_data(table)
