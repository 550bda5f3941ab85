"""Bronze: order files as they came, one row a record, each checked and, if it is no good, put aside with reasons."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pydantic import Field
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from omnirelay_dagster import LeasedBatch, leased_asset

Fate = Literal["quarantine", "dead_letter"]

MOST_BYTES = 256 * 1024
FIELDS = ("order_id", "placed_at", "updated_at", "country", "status", "category", "product", "quantity", "price")

_EVENTS = f"array<struct<{', '.join(f'{name}: string' for name in FIELDS)}>>"
_STRICT = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_TIME = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$"
_NUMBER = r"^-?\d+(\.\d{1,10})?(E\d+)?$"  # numbers of seven digits and more come with an exponent
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
            if Path(path).stat().st_size > most_bytes:
                found[path] = ("huge", f"the file is larger than {most_bytes} bytes")
            elif _is_blank(path):
                found[path] = ("empty", "the file is empty")
        except OSError as error:
            found[path] = ("unreadable", f"the file cannot be read: {error.strerror}")
    return found


def _is_blank(path: str) -> bool:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            if chunk.strip():
                return False
    return True


def records(items: DataFrame, files: Iterable[str], aside: Mapping[str, str]) -> DataFrame:
    """The records of ``files``, checked, and a row with the problem for each of the ``items`` that is put ``aside``."""
    paths = ["file://" + _SIGNS.sub(r"\\\g<0>", path) for path in files]
    frames = [checked(items.sparkSession, paths)] if paths else []
    if aside:
        names = dict.fromkeys(aside.values())
        problem = f.coalesce(
            *(f.when(f.col("resource_id").isin([p for p in aside if aside[p] == each]), f.lit(each)) for each in names)
        )
        rows = items.select(f.substring_index("resource_id", "/", -1).alias("file"), problem.alias("problems"))
        frames.append(rows.where("problems IS NOT NULL"))
    return frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1], allowMissingColumns=True)


def checked(spark: SparkSession, paths: list[str]) -> DataFrame:
    """One row a line: the values if all is well, else the line itself and what is wrong with it."""
    lines = spark.read.text(paths).where(r"value RLIKE '\\S'")
    # within brackets, so that anything after the object is an error and not ignored
    events = f.from_json(f.concat(f.lit("["), f.make_valid_utf8("value"), f.lit("]")), _EVENTS, _STRICT)
    read = lines.select(
        f.url_decode(f.replace("_metadata.file_name", f.lit("+"), f.lit("%2B"))).alias("file"),
        "value",
        f.when(f.size(events) == 1, events[0]).alias("event"),
    ).select("file", "value", "event", *(f.col(f"event.{name}").alias(name) for name in FIELDS))
    typed = read.select(
        "file",
        "order_id",
        *(_time(name).alias(name) for name in ("placed_at", "updated_at")),
        *("country", "status", "category", "product"),
        _number("quantity").cast("decimal(38,10)").alias("quantity"),
        _number("price").alias("price"),
        "value",
        f.col("event").isNull().alias("broken"),
        *(f.col(name).isNotNull().alias(f"has_{name}") for name in FIELDS),
    )
    good = f.col("problems").isNull()
    return typed.withColumn("problems", _problems()).select(
        "file",
        *(f.when(good, f.col(name)).alias(name) for name in FIELDS[:-2]),
        f.when(good, f.col("quantity")).cast("int").alias("quantity"),
        f.when(good, f.col("price")).cast("decimal(14,2)").alias("price"),
        f.when(~good, f.make_valid_utf8("value")).alias("raw"),
        "problems",
    )


def _time(name: str) -> Column:
    return f.when(f.col(name).rlike(_TIME), f.col(name).try_cast("timestamp"))


def _number(name: str) -> Column:
    """A number, also if it is written as text; too many digits are none."""
    value = f.col(name).try_cast("decimal(38,10)")
    fits = value.between(-1_000_000_000, 1_000_000_000)
    return f.when(f.col(name).rlike(_NUMBER) & fits & (value == f.round(value, 0 if name == "quantity" else 2)), value)


def _problems() -> Column:
    """What is wrong with a record, one after the other; null if nothing is."""

    def unless(fine: Column, problem: str) -> Column:
        return f.when(~fine, f.lit(problem))

    shapes = {"placed_at": "a time with a zone", "updated_at": "a time with a zone"}
    shapes |= {"quantity": "a whole number", "price": "an amount of money"}
    each = [
        *(unless(f.col(f"has_{name}"), f"{name} is missing") for name in FIELDS),
        *(unless(f.col(n).isNotNull() | ~f.col(f"has_{n}"), f"{n} is not {shape}") for n, shape in shapes.items()),
        unless(f.col("quantity") >= 1, "quantity is below 1"),
        unless(f.col("price") >= 0, "price is negative"),
    ]
    found = f.concat_ws("; ", *each)
    return (
        f.when(~f.is_valid_utf8("value"), f.lit("not UTF-8"))
        .when(f.col("broken"), f.lit("not a JSON object"))
        .when(found != "", found)
    )
