"""Making the table that a first batch finds missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from lease_core.errors import InvalidInput
from omnirelay_dagster.iceberg.conforming import Footer
from omnirelay_dagster.iceberg.errors import SchemaDrift

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

_TRANSFORM = re.compile(r"(?:(year|month|day|hour|identity)\((.+)\)|(bucket|truncate)\((\d+), *(.+)\)|([^()]+))")

PROPERTIES = {
    # Metadata stays small: earlier versions of it go, and manifests are merged as they come, none of them into one so
    # large that merging would cost more and more.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    "commit.manifest.target-size-bytes": str(256 * 1024),
    # The data files belong to the log. No engine may delete them when it expires snapshots or drops the table.
    "gc.enabled": "false",
}


def transform(text: str) -> tuple[str, str]:
    """The column and the transform, in pyiceberg's notation, of ``day(at)``, ``bucket(16, id)`` or just ``country``."""
    match = _TRANSFORM.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InvalidInput(
            "partition_by",
            f"{text!r}: use a column, year/month/day/hour(column), bucket(n, column), truncate(n, column)",
        )
    by_time, column, sized, size, sized_column, plain = match.groups()
    if plain:
        return plain, "identity"
    return (column, by_time) if by_time else (sized_column, f"{sized}[{size}]")


def create(
    catalog: Catalog,
    identifier: str,
    schema: pa.Schema | Schema,
    partition_by: Iterable[str],
    properties: Mapping[str, str],
) -> Table:
    """Make the table, or load it if somebody else was faster. Either way it is there afterwards."""
    from pyiceberg.exceptions import NamespaceAlreadyExistsError, NoSuchTableError, TableAlreadyExistsError

    with suppress(sa.exc.IntegrityError, NamespaceAlreadyExistsError):  # somebody else made it just now
        catalog.create_namespace_if_not_exists(identifier.rpartition(".")[0])
    try:
        return _create(catalog, identifier, schema, partition_by, {**PROPERTIES, **properties})
    except (TableAlreadyExistsError, sa.exc.IntegrityError):
        try:
            return catalog.load_table(identifier)
        except NoSuchTableError as error:
            raise TableAlreadyExistsError(f"{identifier} is not a table") from error


def _create(catalog: Catalog, identifier: str, schema: Any, partition_by: Iterable[str], properties: Any) -> Table:
    from pyiceberg.transforms import parse_transform

    making = catalog.create_table_transaction(identifier, schema, properties=properties)
    with making.update_spec() as spec:
        for text in partition_by:
            column, how = transform(text)
            try:
                spec.add_field(column, parse_transform(how))
            except ValueError as error:
                raise InvalidInput("partition_by", f"{text!r}: {error}") from error
    names = making.table_metadata.schema().name_mapping.model_dump_json()
    making.set_properties({"schema.name-mapping.default": names})
    making.commit_transaction()
    return catalog.load_table(identifier)


def columns_of(footer: Footer) -> pa.Schema:
    """The columns that a table gets from its first batch. All may be null."""
    import pyarrow as pa

    if footer.untyped:
        names = ", ".join(sorted(footer.untyped))
        raise SchemaDrift(
            f"{footer.where}: the table would get its columns from this batch, but {names} has nothing but nulls and "
            "no type. Give the table a schema: IcebergTable(..., schema=...)",
            tuple(sorted(footer.untyped)),
        )
    footer.schema()  # says what Iceberg has no type for
    return pa.schema([field.with_nullable(True) for field in footer.typed()])
