"""Leased items as a DataFrame."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def items_schema() -> StructType:
    """The columns of ``batch.to_spark()``: the same for every batch, and the same as ``batch.to_arrow()`` has."""
    from pyspark.sql.types import BinaryType, LongType, MapType, StringType, StructType, TimestampType

    schema = StructType()
    schema.add("sequence_id", LongType(), False)  # the item's number in its queue
    schema.add("attempt", LongType(), False)  # which lease of the item this is, from 1
    schema.add("resource_type", StringType(), False)
    schema.add("resource_id", StringType(), False)
    schema.add("partition_key", StringType())
    schema.add("priority", LongType(), False)
    schema.add("request_id", StringType())  # the key by which it was deduplicated
    schema.add("attributes", MapType(StringType(), StringType(), False), False)
    schema.add("payload_encoding", StringType())  # what body is, such as application/json
    schema.add("body", BinaryType())
    schema.add("enqueued_at", TimestampType(), False)
    return schema


def items_frame(spark: SparkSession, items: pa.Table) -> DataFrame:
    """The table of ``LeasedBatch.to_arrow`` as a DataFrame. It goes over as Arrow, also through Spark Connect."""
    return spark.createDataFrame(items, schema=items_schema())
