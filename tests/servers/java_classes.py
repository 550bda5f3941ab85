"""Spark's classes as Java keeps them in memory. A Java that begins with them starts in half the processor time.

`make test` makes them once (`python -m tests.servers.java_classes`) and keeps them in the environment. Java looks by
itself whether they fit, and does without if they do not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

# Every Java that a test starts lives for a minute or two: compiling well would take longer than what it gains.
_BRIEFLY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SILENTLY = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"


HOME = Path(sys.prefix).resolve() / "spark-home"


def spark_home() -> Path:
    """A Spark home of links into the wheel, for everybody: classes are kept for the paths that they were loaded from,
    and the standalone workers of a ``local-cluster`` put their own files into it."""
    wheel = Path(str(files("pyspark"))).resolve()
    HOME.mkdir(exist_ok=True)
    for name in ("jars", "bin", "sbin", "python"):
        with suppress(FileExistsError):
            (HOME / name).symlink_to(wheel / name)
    return HOME


def tidy_home() -> None:
    """Remove what standalone workers have left in the home."""
    shutil.rmtree(HOME / "work", ignore_errors=True)


def kept() -> Path:
    """Where the classes of this Spark are kept for this Java."""
    home = os.environ.get("JAVA_HOME")
    java = Path(home, "bin", "java") if home else Path(shutil.which("java") or "java")
    known = f"{java.resolve()} {java.stat().st_mtime if java.exists() else ''} {version('pyspark')} {HOME}"
    return HOME.with_name(f"spark-classes-{hashlib.sha256(known.encode()).hexdigest()[:12]}.jsa")


def options() -> str:
    """What JDK_JAVA_OPTIONS is to say to every Java that a test starts."""
    return f"{_BRIEFLY} {_SILENTLY} -XX:SharedArchiveFile={kept()}" if kept().exists() else _BRIEFLY


def keep() -> None:
    """Let a Spark do a little, and keep the classes that it has loaded by then."""
    if kept().exists():
        return
    print("keeping Spark's classes, so that each Java of the tests starts sooner", flush=True)
    with tempfile.TemporaryDirectory(dir=kept().parent) as folder:
        archive = Path(folder, "classes.jsa")
        said = f"{_BRIEFLY} {_SILENTLY} -XX:ArchiveClassesAtExit={archive}"
        subprocess.run(
            [sys.executable, "-m", __spec__.name, folder],
            env={**os.environ, "JDK_JAVA_OPTIONS": said, "SPARK_HOME": str(spark_home())},
            capture_output=True,  # which ends when Java does, after Python: only then are the classes written
            check=False,
            timeout=300,
        )
        if archive.exists():
            archive.rename(kept())
        else:
            print("this Java cannot keep them; the tests do without")


def _work(folder: Path) -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from tests.conftest import SPARK

    builder = SparkSession.builder.master("local[2]")
    for key, value in {**SPARK, "spark.sql.warehouse.dir": str(folder / "warehouse")}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    rows = spark.range(100).withColumn("part", F.col("id") % 3)
    rows.write.partitionBy("part").parquet(str(folder / "rows"))
    spark.read.parquet(str(folder / "rows")).groupBy("part").count().orderBy("part").collect()
    spark.stop()


if __name__ == "__main__":
    _work(Path(sys.argv[1])) if sys.argv[1:] else keep()
