"""The tables on disk: parquet files, and a manifest that says which of them count.

A manifest is one version of all tables, with the number of the last event that went into them. It is written under
the next version's name with an operation that fails if the name is taken, so of two updates at once one wins and the
other starts over, and a crash leaves the last version as it was. Files are never changed once a manifest names them.

The folder must be on a file system that all readers and writers share.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lease_core.errors import InvalidInput, LeaseError
from lease_core.replication.durable_file import force_folder
from omnirelay_dagster.spark.governance.table_schemas import SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KEPT_VERSIONS = 10
Parts = dict[str, list[str]]
"""The files of a table, by the part of it that they hold. Paths are relative to the folder."""


class UpdateConflict(LeaseError):
    """Another update of the same tables came first. Nothing of this one counts; start over from where it led."""

    code = "resourcelease.governance_conflict"


class Manifest(msgspec.Struct, frozen=True):
    """One version of the tables. ``watermark``: the last event in them. ``first``: the first."""

    namespace: str
    queue_id: str
    version: int = 0
    first: int = 1
    watermark: int = 0
    as_of: datetime | None = None
    tables: dict[str, Parts] = {}

    def files(self, table: str, parts: Iterable[str] | None = None) -> list[str]:
        """The files of a table, or of some parts of it."""
        held = self.tables.get(table, {})
        chosen = held if parts is None else [part for part in parts if part in held]
        return [path for part in sorted(chosen) for path in held[part]]


class Storage:
    """The folder that holds the tables of one queue."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        text = os.fspath(folder)
        if "://" in text:
            raise InvalidInput("storage", f"is {text!r}; use a folder on a file system that all machines share")
        self.folder = Path(text).absolute()
        self._manifests = self.folder / "manifests"

    def current(self) -> Manifest | None:
        """The newest version; None if there is none yet."""
        names = sorted(self._manifests.glob("v*.json")) if self._manifests.is_dir() else []
        return msgspec.json.decode(names[-1].read_bytes(), type=Manifest) if names else None

    def version(self, number: int) -> Manifest:
        path = self._path(number)
        if not path.is_file():
            raise InvalidInput("version", f"there is no version {number} in {self.folder} (any more)")
        return msgspec.json.decode(path.read_bytes(), type=Manifest)

    def attempt(self, version: int) -> Path:
        """A new folder for files of a version that is to be."""
        folder = self.folder / "data" / f"v{version:09d}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True)
        return folder

    def collect(self, folder: Path) -> Parts:
        """What Spark has written into ``folder`` by parts, made to last."""
        parts: Parts = {}
        for path in sorted(folder.glob("part=*/*.parquet")):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            part = path.parent.name.removeprefix("part=")
            parts.setdefault(part, []).append(path.relative_to(self.folder).as_posix())
        for directory in (*folder.glob("part=*"), folder):
            force_folder(directory)
        return parts

    def commit(self, manifest: Manifest) -> None:
        """Make the manifest the current version, unless another one is already."""
        self._manifests.mkdir(parents=True, exist_ok=True)
        draft = self._manifests / f"draft-{uuid.uuid4().hex}"
        try:
            with draft.open("xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(manifest)))
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, self._path(manifest.version))  # fails if somebody was faster
        except FileExistsError:
            raise UpdateConflict(f"version {manifest.version} of {self.folder} was made by another update") from None
        finally:
            draft.unlink(missing_ok=True)
        force_folder(self._manifests)

    def vacuum(self) -> int:
        """Remove versions that are older than the last few, and files that none of the others names.

        Files of an update under way are for the version after the current one, and stay. Gives how many attempts'
        folders were removed.
        """
        names = sorted(self._manifests.glob("v*.json"))
        for old in names[:-KEPT_VERSIONS]:
            old.unlink(missing_ok=True)
        kept = [msgspec.json.decode(path.read_bytes(), type=Manifest) for path in names[-KEPT_VERSIONS:]]
        if not kept:
            return 0
        needed = {
            path.split("/")[1] for manifest in kept for table in manifest.tables for path in manifest.files(table)
        }
        removed = 0
        for folder in (self.folder / "data").iterdir():
            if folder.name not in needed and int(folder.name[1:10]) <= kept[-1].version:
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed

    def _path(self, version: int) -> Path:
        return self._manifests / f"v{version:09d}.json"


def table_files(storage: str | os.PathLike[str], table: str, version: int | None = None) -> list[str]:
    """The parquet files that make up a table, for any tool that reads parquet. Empty if it has no rows."""
    if table not in SCHEMAS:
        raise InvalidInput("table", f"there is no table {table!r}; there are {', '.join(SCHEMAS)}")
    home = Storage(storage)
    manifest = home.current() if version is None else home.version(version)
    if manifest is None:
        raise InvalidInput("storage", f"there are no tables in {home.folder} yet; bring them up to date first")
    return [str(home.folder / path) for path in manifest.files(table)]


def read_table(
    spark: SparkSession, storage: str | os.PathLike[str], table: str, version: int | None = None
) -> DataFrame:
    """A table as a DataFrame: the newest version, or one of the last few."""
    return load(spark, table, table_files(storage, table, version))


def load(spark: SparkSession, table: str, files: list[str]) -> DataFrame:
    """The rows of some files of a table; of none, no rows."""
    schema = SCHEMAS[table]
    if files:
        return spark.read.schema(schema).parquet(*files)
    return spark.range(0).selectExpr(
        *(f"CAST(NULL AS {field.dataType.simpleString()}) {field.name}" for field in schema)
    )
