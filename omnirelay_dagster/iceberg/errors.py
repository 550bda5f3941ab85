"""What can stand between the log and the table.

    LeaseError
    └── IcebergError
        ├── SchemaDrift         a batch has other columns than the table, and nobody declared that it may
        ├── FilesWrong          published files are gone, or do not hold what was published
        ├── LogMismatch         the table was fed from another queue, another asset or another past of this queue
        ├── WatermarkLost       the table no longer says how far the log was committed
        ├── SnapshotExpired     the state asked for is not kept any more
        └── CommitContended     others kept committing first

None of them leaves anything half done: what was committed before stays, the rest is committed by the next call.
"""

from __future__ import annotations

from lease_core import LeaseError


class IcebergError(LeaseError):
    code = "resourcelease.iceberg"


class SchemaDrift(IcebergError):
    """``columns`` are those that differ."""

    code = "resourcelease.schema_drift"

    def __init__(self, message: str, columns: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.columns = columns


class FilesWrong(IcebergError):
    code = "resourcelease.files_wrong"


class LogMismatch(IcebergError):
    code = "resourcelease.log_mismatch"


class WatermarkLost(IcebergError):
    code = "resourcelease.watermark_lost"


class SnapshotExpired(IcebergError):
    code = "resourcelease.snapshot_expired"


class CommitContended(IcebergError):
    code = "resourcelease.commit_contended"
