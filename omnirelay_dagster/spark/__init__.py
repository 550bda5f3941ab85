"""Spark: leased batches as Spark jobs, and their outputs as DataFrames.

    java            a Java that Spark can run on, and the environment it is found in
    session         which session is meant, classic or Spark Connect
    items           leased items as a DataFrame
    job_group       all that a batch runs on Spark, to be cancelled as one
    progress        how far its stages are
    parquet_output  DataFrames as outputs of leases
    output_files    what one such output consists of
    schema_drift    what may change between batches, and what is refused

Nothing here is imported, and neither is PySpark, before somebody uses it.
"""
