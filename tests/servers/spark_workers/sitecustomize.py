"""Python imports this at its start wherever this folder is on the path: in the workers of the tests' Spark.

Spark asks processes of several kinds about a source (its schema, filters, partitions, rows), and each kind has a
process that does nothing but fork others, every one of which would import the source anew. This one does it once.
"""

import sys

FORKING = ["-m", "pyspark.daemon"]
WITHOUT_IT = "pyspark.sql.worker.lookup_data_sources"

if sys.orig_argv[1:3] == FORKING and sys.orig_argv[3:4] != [WITHOUT_IT]:
    import omnirelay_dagster.spark.log_source  # noqa: F401
