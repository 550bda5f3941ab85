"""Bronze: order files as they came, one row a record, each checked and, if it is no good, put aside with reasons."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from functools import partial, reduce
from typing import Literal

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from omnirelay_dagster import LeasedBatch, leased_asset

Fate = Literal["quarantine", "dead_letter"]

MOST_BYTES = 256 * 1024
FIELDS = {
    "order_id": "string",
    "placed_at": "timestamp",
    "updated_at": "timestamp",
    "country": "string",
    "status": "string",
    "category": "string",
    "product": "string",
    "quantity": "int",
    "price": "decimal(14,2)",
}
COLUMNS = {"file": "string", **FIELDS, "raw": "string", "problems": "string"}

_EVENTS = f"array<struct<{', '.join(f'{name}: string' for name in FIELDS)}>>"
_STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_TIME = "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})$"
_NUMBER = "^-?[0-9]+([.][0-9]{1,10})?(E[0-9]+)?$"  # numbers of seven digits and more come with an exponent
_SIGNS = re.compile(r"[\\{}\[\]*?]")
_CHUNK = 65_536


class BronzeConfig(dg.Config):
    """What becomes of files that cannot be used at all: a row in the quarantine, or a dead letter to be requeued."""

    most_bytes: int = Field(MOST_BYTES, description="files larger than this are not read")
    huge_files: Fate = "dead_letter"
    empty_files: Fate = "quarantine"
    unreadable_files: Fate = "dead_letter"
    seconds_per_batch: float = Field(0.0, description="makes it look like work, so that there is something to kill")


@leased_asset(
    queue="landing",
    batch_size=25,
    drain=True,
    max_seconds=120,
    io_manager_key="bronze_io",
    group_name="orders",
    kinds={"spark", "bronze"},
)
def bronze_orders(
    context: dg.AssetExecutionContext, config: BronzeConfig, batch: LeasedBatch, pyspark: LazyPySparkResource
) -> DataFrame | None:
    """Every record of the leased files. ``problems`` is null, or says why a record or a whole file is put aside."""
    _work_for(config.seconds_per_batch, batch)
    useless = examine((item.resource_id for item in batch.items), config.most_bytes)
    fates = {"huge": config.huge_files, "empty": config.empty_files, "unreadable": config.unreadable_files}
    for lease in batch.leases:
        kind, problem = useless.get(lease.item.resource_id, ("", ""))
        if fates.get(kind) == "dead_letter":
            context.log.warning(f"{lease.item.resource_id}: {problem}")
            batch.fail(lease, problem, requeue=False)  # it will be no better next time
    if not batch.remaining:
        return None
    aside = {path: problem for path, (kind, problem) in useless.items() if fates[kind] == "quarantine"}
    files = [lease.item.resource_id for lease in batch.remaining if lease.item.resource_id not in aside]
    return records(batch.to_spark(pyspark), files, aside)


def _work_for(seconds: float, batch: LeasedBatch) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        batch.check()
        time.sleep(min(0.1, seconds))


def examine(paths: Iterable[str], most_bytes: int) -> dict[str, tuple[str, str]]:
    """The files that are of no use as a whole: whether they are huge, empty or unreadable, and what to tell."""
    found = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size > most_bytes:
                    found[path] = ("huge", f"the file is larger than {most_bytes} bytes")
                elif not any(chunk.strip() for chunk in iter(partial(file.read, _CHUNK), b"")):
                    found[path] = ("empty", "the file is empty")
        except OSError as error:
            found[path] = ("unreadable", f"the file cannot be read ({type(error).__name__})")
    return found


def records(items: DataFrame, files: Iterable[str], aside: Mapping[str, str]) -> DataFrame:
    """The records of ``files``, checked, and a row with the problem for each of the ``items`` that is put ``aside``."""
    paths = ["file://" + _SIGNS.sub(r"\\\g<0>", path) for path in files]
    frames = [checked(items.sparkSession, paths)] if paths else []
    frames += [_whole_files(items, [path for path in aside if aside[path] == each], each) for each in {*aside.values()}]
    return reduce(DataFrame.unionByName, frames)


def _whole_files(items: DataFrame, paths: list[str], problem: str) -> DataFrame:
    values = {name: f"CAST(null AS {kind})" for name, kind in COLUMNS.items()}
    values |= {"file": "substring_index(resource_id, '/', -1)", "problems": f"'{problem}'"}
    rows = items.where(f.col("resource_id").isin(paths))
    return rows.selectExpr(*(f"{value} AS {name}" for name, value in values.items()))


def checked(spark: SparkSession, paths: list[str]) -> DataFrame:
    """One row a line: the values if all is well, else the line itself and what is wrong with it."""
    # within brackets, so that anything after the object is an error and not ignored
    array = f.from_json(f.expr("concat('[', make_valid_utf8(value), ']')"), _EVENTS, _STRICT)
    lines = (
        spark.read.text(paths).where(r"value RLIKE '\\S'").select("_metadata.file_name", "value", array.alias("array"))
    )
    events = lines.selectExpr(
        "url_decode(replace(file_name, '+', '%2B')) AS file", "value", "if(size(array) = 1, array[0], null) AS event"
    )
    typed = events.selectExpr("file", "value", "event", *(f"{sql} AS {name}" for name, sql in _VALUES.items()))
    told = typed.selectExpr("*", f"{_PROBLEMS} AS problems")
    return told.selectExpr(
        "file",
        *(f"if(problems IS NULL, {name}, null) AS {name}" for name in FIELDS),
        "if(problems IS NULL, null, make_valid_utf8(value)) AS raw",
        "problems",
    )


def _time(name: str) -> str:
    return f"if(event.{name} RLIKE '{_TIME}', try_cast(event.{name} AS timestamp), null)"


def _number(name: str, digits: int) -> str:
    """A number, also if it is written as text; one with too many digits is none."""
    value = f"try_cast(event.{name} AS decimal(38,10))"
    fits = f"event.{name} RLIKE '{_NUMBER}' AND abs({value}) < 1000000000 AND {value} = round({value}, {digits})"
    return f"CAST(if({fits}, {value}, null) AS {FIELDS[name]})"


_VALUES = {name: f"event.{name}" for name in FIELDS} | {
    "placed_at": _time("placed_at"),
    "updated_at": _time("updated_at"),
    "quantity": _number("quantity", 0),
    "price": _number("price", 2),
}
_SHAPES = {
    "placed_at": "a time with a zone",
    "updated_at": "a time with a zone",
    "quantity": "a whole number",
    "price": "an amount of money",
}
_WRONG = {
    **{f"event.{name} IS NULL": f"{name} is missing" for name in FIELDS},
    **{f"event.{name} IS NOT NULL AND {name} IS NULL": f"{name} is not {shape}" for name, shape in _SHAPES.items()},
    "quantity < 1": "quantity is below 1",
    "price < 0": "price is negative",
}
_EACH = ", ".join(f"if({wrong}, '{problem}', null)" for wrong, problem in _WRONG.items())
_PROBLEMS = f"""CASE
    WHEN NOT is_valid_utf8(value) THEN 'not UTF-8'
    WHEN event IS NULL THEN 'not a JSON object'
    ELSE nullif(concat_ws('; ', {_EACH}), '')
END"""
