"""Where a batch's columns differ from the table's, and whether that was declared.

Nothing becomes null silently, and nothing changes its type silently. A file that is narrower than the table (int in a
long column, say) is no drift: Iceberg reads it without loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from lease_core.errors import InvalidInput
from omnirelay_dagster.iceberg.errors import SchemaDrift

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.types import IcebergType, NestedField

Evolution = Literal["add_columns", "widen_types", "omit_columns"]
ALL: tuple[Evolution, ...] = get_args(Evolution)


class Difference(NamedTuple):
    """``declared`` is what has to be declared for it to pass; nothing, if it can never."""

    column: str
    what: str
    declared: Evolution | None


def evolution(declared: Iterable[str] | bool) -> frozenset[str]:
    """What a table's owner declared: ``True`` is all of it."""
    if isinstance(declared, bool):
        return frozenset(ALL if declared else ())
    given = frozenset([declared] if isinstance(declared, str) else declared)
    if unknown := given - set(ALL):
        raise InvalidInput("evolve", f"{', '.join(sorted(unknown))}: choose from {', '.join(ALL)}")
    return given


def differences(table: Schema, file: Schema, untyped: Iterable[str] = ()) -> list[Difference]:
    """How the file differs from the table. Columns of ``untyped`` have only nulls, and no type of their own."""
    return list(_fields(table.fields, file.fields, "", frozenset(untyped)))


def refuse(found: list[Difference], allowed: frozenset[str], where: str) -> bool:
    """Raise if any difference was not declared. Gives whether the table has to change for those that were."""
    wrong = [each for each in found if each.declared is None or each.declared not in allowed]
    if wrong:
        listed = "; ".join(f"{each.column} {each.what}" for each in wrong)
        missing = sorted({each.declared for each in wrong if each.declared is not None})
        remedy = (
            f"If that is meant, declare it: evolve={missing!r}. "
            if missing and all(each.declared for each in wrong)
            else "Mend the batch's producer, or give the new kind of batch a table of its own. "
        )
        raise SchemaDrift(
            f"{where} does not fit the table: {listed}. {remedy}Batches before it are committed; it, and what comes "
            "after it, waits",
            tuple(each.column for each in wrong),
        )
    return any(each.declared in ("add_columns", "widen_types") for each in found)


def _fields(
    table: tuple[NestedField, ...], file: tuple[NestedField, ...], inside: str, untyped: frozenset[str] = frozenset()
) -> Iterator[Difference]:
    known = {field.name: field for field in table}
    there = {field.name: field for field in file}
    for name, field in there.items():
        if name not in known:
            yield Difference(f"{inside}{name}", f"is new ({field.field_type})", "add_columns")
        else:
            yield from _types(known[name].field_type, field.field_type, f"{inside}{name}")
    for name, field in known.items():
        if name not in there and name not in untyped:
            declared: Evolution | None = None if field.required else "omit_columns"
            yield Difference(f"{inside}{name}", f"is missing ({field.field_type})", declared)


def _types(table: IcebergType, file: IcebergType, column: str) -> Iterator[Difference]:
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(table, StructType) and isinstance(file, StructType):
        yield from _fields(table.fields, file.fields, f"{column}.")
    elif isinstance(table, ListType) and isinstance(file, ListType):
        yield from _types(table.element_type, file.element_type, f"{column}.element")
    elif isinstance(table, MapType) and isinstance(file, MapType):
        yield from _types(table.key_type, file.key_type, f"{column}.key")
        yield from _types(table.value_type, file.value_type, f"{column}.value")
    elif not _fits(file, into=table):
        declared: Evolution | None = "widen_types" if _fits(table, into=file) else None
        yield Difference(column, f"is {file}, in the table {table}", declared)


def _fits(kind: Any, *, into: Any) -> bool:
    """Whether all values of a type are values of the other, by Iceberg's own rules."""
    from pyiceberg.types import DecimalType, DoubleType, FloatType, IntegerType, LongType

    if kind == into:
        return True
    if isinstance(kind, DecimalType) and isinstance(into, DecimalType):
        return bool(kind.scale == into.scale and kind.precision <= into.precision)
    return (type(kind), type(into)) in {(IntegerType, LongType), (FloatType, DoubleType)}
