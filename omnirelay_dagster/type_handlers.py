"""How values become files and files become values again: one small class for each kind of value.

A handler that is written for a project's own type goes into a subclass of ``FencedIOManager``::

    class Images(FencedIOManager):
        handlers = (ImageHandler(),)

Nothing here pickles: a file written today is read by any later version, and by other tools.
"""

from __future__ import annotations

import io
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa


class Storing(NamedTuple):
    """What a handler may want to know beyond the value: whose output it is, and what was declared for it."""

    subject: str = ""
    partition_by: tuple[str, ...] = ()
    schema_evolution: tuple[str, ...] = ()
    earlier: Callable[[], Sequence[str]] = lambda: ()
    session: Any = None


class TypeHandler(ABC):
    """Stores values of one kind, and loads many of them as one.

    ``name`` is published with each output and says who can read it; ``suffix`` ends the file's name. Handlers with the
    same suffix read each other's files, so what was written from pandas can be loaded with polars.
    """

    name: ClassVar[str]
    suffix: ClassVar[str]

    @abstractmethod
    def matches(self, kind: type) -> bool:
        """Whether values of this type are stored, and inputs annotated with it are loaded, by this handler."""

    def configured(self, storing: Storing) -> TypeHandler:
        """The handler for one asset. Most need to know nothing about it."""
        return self

    @abstractmethod
    def write(self, value: Any, fs: Any, path: str) -> int | None:
        """Write the value to ``path`` (its folder exists) on an fsspec filesystem. Gives its rows, if it has any."""

    @abstractmethod
    def read(self, fs: Any, paths: Sequence[str]) -> Any:
        """The values at the paths, in that order, as one. Without any path: the empty value."""


def is_kind(kind: type, module: str, name: str) -> bool:
    """Whether ``kind`` is that class. A library that nobody has imported is not imported to find out."""
    known = getattr(sys.modules.get(module), name, None)
    return isinstance(known, type) and isinstance(kind, type) and issubclass(kind, known)


def _tables(fs: Any, paths: Sequence[str], suffix: str) -> pa.Table:
    """The parquet files as one table. Columns that a batch lacks are null; types widen where batches differ."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables: list[pa.Table] = []
    for path in paths:
        if fs.isdir(path):
            tables.append(_folder(fs, path))
            continue
        with fs.open(path, "rb") as stream:
            tables.append(pq.ParquetFile(stream).read())
    return pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})


def _folder(fs: Any, path: str) -> pa.Table:
    """What Spark wrote: the files that were published, with the columns that are in the names of their folders."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    from omnirelay_dagster.spark.output_files import partition_columns, read_note

    note = read_note(fs, path)
    names = [field["name"] for field in note["schema"]["fields"]]
    files = [f"{path}/{file['path']}" for file in note["files"]]
    if not files:  # an empty output that is partitioned
        return pa.table({name: pa.nulls(0) for name in names})
    columns = partition_columns(note)
    partitioning = ds.partitioning(columns, flavor="hive") if columns.names else None
    found = ds.dataset(files, format="parquet", filesystem=fs, partitioning=partitioning, partition_base_dir=path)
    return found.to_table(names)


class PandasHandler(TypeHandler):
    """Data frames as parquet. A named index is kept; plain row numbers are not, as every batch has its own."""

    name = "pandas"
    suffix = ".parquet"

    def matches(self, kind: type) -> bool:
        return is_kind(kind, "pandas", "DataFrame")

    def write(self, value: pd.DataFrame, fs: Any, path: str) -> int:
        row_numbers = value.index.nlevels == 1 and value.index.name is None and value.index.dtype.kind in "iu"
        with fs.open(path, "wb") as stream:
            value.to_parquet(stream, engine="pyarrow", index=False if row_numbers else None)
        return len(value)

    def read(self, fs: Any, paths: Sequence[str]) -> pd.DataFrame:
        import pyarrow as pa

        table = _tables(fs, paths, self.suffix)
        frame: pd.DataFrame
        try:
            frame = table.to_pandas()
        except (pa.ArrowException, TypeError, ValueError):  # the first batch's notes on dtypes do not fit all others
            frame = table.to_pandas(ignore_metadata=True)
        return frame


class ArrowHandler(TypeHandler):
    """Arrow tables as parquet."""

    name = "pyarrow"
    suffix = ".parquet"

    def matches(self, kind: type) -> bool:
        return is_kind(kind, "pyarrow", "Table")

    def write(self, value: pa.Table, fs: Any, path: str) -> int:
        import pyarrow.parquet as pq

        with fs.open(path, "wb") as stream:
            pq.write_table(value, stream)
        return int(value.num_rows)

    def read(self, fs: Any, paths: Sequence[str]) -> pa.Table:
        return _tables(fs, paths, self.suffix)


class PolarsHandler(TypeHandler):
    """Polars data frames as parquet."""

    name = "polars"
    suffix = ".parquet"

    def matches(self, kind: type) -> bool:
        return is_kind(kind, "polars", "DataFrame")

    def write(self, value: pl.DataFrame, fs: Any, path: str) -> int:
        buffer = io.BytesIO()
        value.write_parquet(buffer)
        with fs.open(path, "wb") as stream:
            stream.write(buffer.getbuffer())
        return value.height

    def read(self, fs: Any, paths: Sequence[str]) -> pl.DataFrame:
        import polars as pl

        frames = [self._frame(fs, path) for path in paths]
        return pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()

    def _frame(self, fs: Any, path: str) -> pl.DataFrame:
        import polars as pl

        if not fs.isdir(path):
            return pl.read_parquet(io.BytesIO(fs.cat_file(path)))
        frame = pl.from_arrow(_folder(fs, path))
        assert isinstance(frame, pl.DataFrame)
        return frame


class JsonHandler(TypeHandler):
    """Plain Python as JSON. Loading gives one list: lists are joined, any other value is an element of it.

    What would come back as something else (a tuple, a key that is not text, NaN) is refused rather than changed.
    """

    name = "json"
    suffix = ".json"

    def matches(self, kind: type) -> bool:
        return isinstance(kind, type) and issubclass(kind, list | dict | str | int | float)

    def write(self, value: Any, fs: Any, path: str) -> int:
        for where, problem in _not_json(value):
            raise TypeError(f"value{where}: {problem}")
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        with fs.open(path, "wb") as stream:
            stream.write(text.encode())
        return len(value) if isinstance(value, list) else 1

    def read(self, fs: Any, paths: Sequence[str]) -> list[Any]:
        joined: list[Any] = []
        for path in paths:
            value = json.loads(fs.cat_file(path))
            joined.extend(value if isinstance(value, list) else [value])
        return joined


_PLAIN = (str, int, bool, type(None))


def _not_json(value: Any) -> Iterator[tuple[str, str]]:
    """Every place in the value that JSON cannot hold as it is, and what to do about it."""
    if isinstance(value, list | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                yield "", f"the key {key!r} is not text, and JSON knows no other keys; use {str(key)!r}"
            if type(each) not in _PLAIN:
                yield from ((f"[{key!r}]{where}", problem) for where, problem in _not_json(each))
    elif isinstance(value, float) and not math.isfinite(value):
        yield "", f"JSON has no {value}; use None"
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        yield "", f"JSON has no {kind}; turn it into text, numbers, lists and dicts, or write a type handler for it"


BUILT_IN: tuple[TypeHandler, ...] = (PandasHandler(), ArrowHandler(), PolarsHandler(), JsonHandler())
"""Tried in this order, after a manager's own."""
