"""What the columns of an asset may do from batch to batch: stay as they are, or change as was declared."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

Evolution = Literal["add_columns", "widen_types"]

EVOLUTIONS: tuple[Evolution, ...] = ("add_columns", "widen_types")


class SchemaDrift(TypeError):
    """A batch has other columns than those before it, and that was not declared. Names the columns."""


class Column(NamedTuple):
    """A column, and the batch that last said what it is."""

    type: DataType
    batch: str


class Columns:
    """The columns of an asset, batch by batch, in the order in which they came."""

    def __init__(self, subject: str, evolution: Collection[str]) -> None:
        self._subject = subject
        self._evolution = evolution
        self._columns: dict[str, Column] = {}
        self._seen = False

    def add(self, schema: StructType, batch: str, *, published: bool) -> None:
        """Take in the columns of one more batch, or raise ``SchemaDrift``.

        A batch that is yet to be published must not lack columns that the asset has. One that is published may, if
        columns may be added: its writer could not know of another's that came at the same moment.
        """
        problems = []
        given = {field.name: field.dataType for field in schema.fields}
        for name, kind in given.items():
            problems += self._take(name, kind, batch)
        if not (published and "add_columns" in self._evolution):
            problems += [
                f"{name} ({known.type.simpleString()} in {known.batch}) is missing"
                for name, known in self._columns.items()
                if name not in given
            ]
        self._seen = True
        if problems:
            raise SchemaDrift(self._message(batch, problems))

    def _take(self, name: str, kind: DataType, batch: str) -> list[str]:
        known = self._columns.get(name)
        if known is None:
            if self._seen and "add_columns" not in self._evolution:
                return [f"{name} ({kind.simpleString()}) is new; to allow it, declare 'add_columns'"]
            self._columns[name] = Column(kind, batch)
            return []
        common = in_common(known.type, kind, self._evolution)
        if common is None:
            hint = ""
            if "widen_types" not in self._evolution and in_common(known.type, kind, EVOLUTIONS) is not None:
                hint = "; to allow it, declare 'widen_types'"
            was = f"{known.type.simpleString()} in {known.batch}"
            return [f"{name} is {kind.simpleString()}, but {was}{hint}"]
        if common != known.type:
            self._columns[name] = Column(common, batch)
        return []

    def _message(self, batch: str, problems: list[str]) -> str:
        shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
        return (
            f"{self._subject}: the columns of {batch} differ from those of earlier batches: {shown}. Bring them in "
            'line with select and cast; or declare the change: FencedIOManager(schema_evolution=["add_columns", '
            '"widen_types"]), or metadata={"omnirelay/schema_evolution": [...]} on the asset'
        )

    def schema(self) -> StructType:
        """All of the columns, each with the widest type it has had."""
        from pyspark.sql.types import StructType

        whole = StructType()
        for name, column in self._columns.items():
            whole.add(name, column.type)
        return whole


def in_common(one: Any, other: Any, evolution: Collection[str]) -> DataType | None:
    """The type that holds the values of both, as far as that is declared. Whether nulls are allowed does not count."""
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(one, StructType) and isinstance(other, StructType):
        return _structs(one, other, evolution)
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        inner = in_common(one.elementType, other.elementType, evolution)
        return None if inner is None else ArrayType(inner)
    if isinstance(one, MapType) and isinstance(other, MapType):
        value = in_common(one.valueType, other.valueType, evolution)
        return None if value is None or one.keyType != other.keyType else MapType(one.keyType, value)
    if one == other:
        return one  # type: ignore[no-any-return]
    if "widen_types" not in evolution:
        return None
    return other if _widens(one, other) else one if _widens(other, one) else None


def _structs(one: StructType, other: StructType, evolution: Collection[str]) -> DataType | None:
    from pyspark.sql.types import StructType

    mine = {field.name: field.dataType for field in one.fields}
    theirs = {field.name: field.dataType for field in other.fields}
    if mine.keys() != theirs.keys() and "add_columns" not in evolution:
        return None
    both = StructType()
    for name in {**mine, **theirs}:
        kind = mine.get(name, theirs.get(name))
        if name in mine and name in theirs:
            kind = in_common(mine[name], theirs[name], evolution)
        if kind is None:
            return None
        both.add(name, kind)
    return both


def _widens(narrow: DataType, wide: DataType) -> bool:
    """Whether every value of the one is exactly a value of the other, and Spark reads parquet files that way."""
    from pyspark.sql import types as t

    digits: dict[type[DataType], int] = {t.ByteType: 3, t.ShortType: 5, t.IntegerType: 10, t.LongType: 19}
    whole = digits.get(type(narrow))
    if isinstance(wide, t.DecimalType):
        if isinstance(narrow, t.DecimalType):
            return wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale
        # Spark reads the smaller ones as if they were int, and wants room for that
        return whole is not None and wide.precision - wide.scale >= max(whole, 10)
    if whole is not None and type(wide) in digits:
        return whole < digits[type(wide)]
    if isinstance(wide, t.DoubleType):
        return isinstance(narrow, t.FloatType | t.ByteType | t.ShortType | t.IntegerType)
    return isinstance(narrow, t.DateType) and isinstance(wide, t.TimestampNTZType)
