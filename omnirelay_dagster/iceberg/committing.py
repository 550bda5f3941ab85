"""One commit: the files of some batches and the watermark, in one transaction of the table.

The transaction requires that the branch still ends at the snapshot the watermark was read from. Should anybody have
committed meanwhile it fails as a whole, and the committer reads the watermark again. pyiceberg would rather move such
an append onto the new snapshot by itself, which is right for an append that stands alone and wrong here: what it
brings may be in the table already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from omnirelay_dagster.iceberg import watermark
from omnirelay_dagster.iceberg.conforming import Footer, data_files, read_footer, typed_like
from omnirelay_dagster.iceberg.errors import FilesWrong, SchemaDrift
from omnirelay_dagster.iceberg.log_reading import Batch, files_of
from omnirelay_dagster.iceberg.schema_drift import differences, refuse
from omnirelay_dagster.iceberg.watermark import Mark

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.snapshots import MetadataLogEntry

_READERS = 8
MAIN_BRANCH = "main"
NO_RETRIES = {"commit.retry.num-retries": "0"}

Step = Callable[[str], None]


class Planned(NamedTuple):
    """Batches whose files were looked at. Files without a row are not among the footers."""

    batches: list[Batch]
    footers: list[Footer]


class Landed(NamedTuple):
    snapshot_id: int
    files: int
    rows: int
    rewritten: int


def plan(fs: Any, base: str, batches: list[Batch], most_files: int) -> Planned:
    """Look at the files of as many batches as ``most_files`` allows, of one at least."""
    taken: list[Batch] = []
    footers: list[Footer] = []
    with ThreadPoolExecutor(_READERS, "omnirelay-footers") as readers:
        for batch in batches:
            files = files_of(fs, base, batch)
            if taken and len(footers) + len(files) > most_files:
                break
            found = list(readers.map(lambda file: read_footer(fs, file), files))
            _check_rows(batch, found)
            taken.append(batch)
            footers += [footer for footer in found if footer.rows]
    return Planned(taken, footers)


def _check_rows(batch: Batch, footers: list[Footer]) -> None:
    published, there = batch.published, sum(footer.rows for footer in footers)
    if published.rows is not None and published.rows != there:
        raise FilesWrong(
            f"{published.uri} was published under number {published.sequence_number} with {published.rows} rows and "
            f"has {there} now: files were added, removed or replaced by hand. Nothing of it was committed"
        )


def light(metadata: TableMetadata, old: list[int]) -> TableMetadata:
    """The table's metadata as a commit needs it: pyiceberg's own retries off, and without the snapshots and earlier
    versions that it does not touch. A transaction copies its metadata many times over, and a commit would cost more
    with every one kept. What is committed is applied to the whole of it, which the catalog loads afresh."""
    main = metadata.current_snapshot()
    kept = [each for each in metadata.snapshots if each == main or each.snapshot_id in old]
    refs = {name: ref for name, ref in metadata.refs.items() if name == MAIN_BRANCH}
    properties = {**metadata.properties, **NO_RETRIES}
    changes = {"properties": properties, "snapshots": kept, "snapshot_log": [], "refs": refs}
    return metadata.model_copy(update={**changes, "metadata_log": _leaving(metadata)})


def _leaving(metadata: TableMetadata) -> list[MetadataLogEntry]:
    """The earlier versions that a commit pushes out of the log: their files are deleted after it."""
    from pyiceberg.table import TableProperties

    most = int(
        metadata.properties.get(
            TableProperties.METADATA_PREVIOUS_VERSIONS_MAX, TableProperties.METADATA_PREVIOUS_VERSIONS_MAX_DEFAULT
        )
    )
    return metadata.metadata_log[: max(0, len(metadata.metadata_log) - max(1, most) + 1)]


def fit(transaction: Transaction, planned: Planned, allowed: frozenset[str]) -> Planned:
    """Change the table's columns as far as that was declared. Gives the batches up to the first that does not fit."""
    fitting: list[Footer] = []
    for footer in planned.footers:
        schema = transaction.table_metadata.schema()
        footer = typed_like(footer, schema)
        try:
            if refuse(differences(schema, footer.schema(), footer.untyped), allowed, footer.where):
                with transaction.update_schema() as update:
                    update.union_by_name(footer.typed())
            _check_untyped(footer, transaction)
            _check_required(footer, transaction)
        except SchemaDrift:
            before = planned.batches[: planned.batches.index(footer.file.batch)]
            if not before:
                raise
            return Planned(before, [each for each in fitting if each.file.batch in before])
        fitting.append(footer)
    return planned._replace(footers=fitting)


def _check_untyped(footer: Footer, transaction: Transaction) -> None:
    unknown = footer.untyped - {field.name for field in transaction.table_metadata.schema().fields}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise SchemaDrift(
            f"{footer.where}: column {names} has nothing but nulls and no type, so the table cannot have it; leave it "
            "out, or give it a type where it is made",
            tuple(sorted(unknown)),
        )


def _check_required(footer: Footer, transaction: Transaction) -> None:
    required = {field.name for field in transaction.table_metadata.schema().fields if field.required}
    for group in range(footer.metadata.num_row_groups if required else 0):
        for position in range(footer.metadata.num_columns):
            column = footer.metadata.row_group(group).column(position)
            nulls = column.statistics.null_count if column.is_stats_set and column.statistics.has_null_count else 1
            nullable = footer.metadata.schema.column(position).max_definition_level > 0
            if column.path_in_schema in required and nullable and nulls:
                name = column.path_in_schema
                raise SchemaDrift(f"{footer.where}: column {name!r} is required and has nulls", (name,))


def commit(
    table: Table, fs: Any, planned: Planned, mark: Mark, namespace: str, allowed: frozenset[str], keep: int, step: Step
) -> tuple[Landed | None, Planned]:
    """Commit the batches with their mark. Gives what came of it, and those that were committed.

    Raises ``CommitFailedException`` if anybody else committed since ``table`` was loaded; then nothing happened.
    """
    from pyiceberg.exceptions import CommitFailedException
    from pyiceberg.table.update.snapshot import ExpireSnapshots

    marks = watermark.all_marks(table.metadata)
    old = list(_beyond(table.metadata, keep - 1))  # the new one is among those kept
    table.metadata = light(table.metadata, old)
    transaction = table.transaction()
    fitting = fit(transaction, planned, allowed)
    mark = mark if len(fitting.batches) == len(planned.batches) else _moved(mark, fitting.batches[-1])
    if not fitting.footers:
        return None, fitting
    _map_names(transaction)
    metadata = transaction.table_metadata
    made: list[tuple[list[DataFile], bool]] = []
    try:
        for footer in fitting.footers:
            made.append(data_files(footer, fs, metadata, table.io))
        step("written")
        files = [file for some, _ in made for file in some]
        properties = {**marks, **mark.properties(namespace)}
        transaction.set_properties(watermark.noted(table.metadata, namespace, mark))
        with transaction.update_snapshot(properties).merge_append() as append:
            for file in files:
                append.append_data_file(file)
        step("staged")
        if old:
            ExpireSnapshots(transaction).by_ids(old).commit()
        transaction.commit_transaction()
    except (CommitFailedException, SchemaDrift):
        _remove(table, [file for some, anew in made if anew for file in some])  # for certain not in the table
        raise
    landed = Landed(append.snapshot_id, len(files), sum(f.record_count for f in files), sum(anew for _, anew in made))
    return landed, fitting


def _moved(mark: Mark, last: Batch) -> Mark:
    return mark._replace(sequence=last.upto, batch=last.upto, lease=last.published.lease_id)


def _map_names(transaction: Transaction) -> None:
    """Files that were not written for Iceberg have no column ids: readers go by these names."""
    if transaction.table_metadata.name_mapping() is None:
        names = transaction.table_metadata.schema().name_mapping.model_dump_json()
        transaction.set_properties({"schema.name-mapping.default": names})


def _beyond(metadata: TableMetadata, keep: int) -> Iterator[int]:
    """Snapshots of the main line older than the newest ``keep``; never the current one, nor one that has a name."""
    named = {ref.snapshot_id for ref in metadata.refs.values()}
    for position, snapshot in enumerate(watermark.ancestors(metadata)):
        if position >= keep and snapshot.snapshot_id not in named:
            yield snapshot.snapshot_id


def _remove(table: Table, files: list[DataFile]) -> None:
    for file in files:
        with suppress(OSError):  # tidy() finds it later
            table.io.delete(file.file_path)
