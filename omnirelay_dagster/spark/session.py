"""Which Spark session is meant, and of which kind it is."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_PYSPARK = "PySpark is not installed: pip install 'omnirelay-dagster[spark]'"


def session_of(given: Any) -> SparkSession:
    """The session that is given, that a dagster-pyspark resource has, or, without either, that is active here."""
    if given is None:
        return active_session()
    if is_session(given):
        return given  # type: ignore[no-any-return]
    if is_resource(given):
        if "spark.remote" in given.spark_config or os.environ.get("SPARK_REMOTE"):
            check_connect()
        with _interrupts_kept():
            return given.spark_session  # type: ignore[no-any-return]
    raise TypeError(
        f"spark: a {type(given).__module__}.{type(given).__qualname__} is no Spark session; give a SparkSession, or "
        "dagster-pyspark's PySparkResource or LazyPySparkResource"
    )


def check_connect() -> None:
    """Raise if a client of Spark Connect lacks packages. PySpark itself ends the process in a step of Dagster's."""
    packages = {"grpc": "grpcio", "grpc_status": "grpcio-status", "google.rpc": "googleapis-common-protos"}
    missing = [package for module, package in (packages | {"zstandard": "zstandard"}).items() if not _there(module)]
    if missing:
        raise ImportError(
            f"Spark Connect needs {', '.join(missing)}, not installed here: pip install 'pyspark[connect]'"
        )


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package it would be in
        return False


def active_session() -> SparkSession:
    """The session of this thread or, failing that, of this process."""
    session: SparkSession | None = _known(sys.modules.get("pyspark.sql.connect.session"))
    if session is None:
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise ImportError(NO_PYSPARK) from error
        session = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if session is None:
        raise RuntimeError(
            "no Spark session is active in this process: pass one, as in batch.to_spark(pyspark), and give the "
            "FencedIOManager the resource, as in FencedIOManager(spark=pyspark, ...)"
        )
    return session


def _known(connect: Any) -> Any:
    """The Spark Connect session in use, if Connect was ever imported and its server has not closed it."""
    if connect is None:
        return None
    return connect.SparkSession.getActiveSession() or connect.SparkSession._get_default_session()


def is_session(value: Any) -> bool:
    """Whether it is a session, classic or Connect. PySpark is not imported to find out."""
    known = getattr(sys.modules.get("pyspark.sql"), "SparkSession", None)
    connect = getattr(sys.modules.get("pyspark.sql.connect.session"), "SparkSession", None)
    kinds = tuple(kind for kind in (known, connect) if isinstance(kind, type))
    return isinstance(value, kinds)


def is_resource(value: Any) -> bool:
    """Whether it is one of dagster-pyspark's resources."""
    module = sys.modules.get("dagster_pyspark.resources") or sys.modules.get("dagster_pyspark")
    kinds = (getattr(module, "PySparkResource", None), getattr(module, "LazyPySparkResource", None))
    return isinstance(value, tuple(kind for kind in kinds if isinstance(kind, type)))


def sessions_among(values: Iterable[Any]) -> Iterator[SparkSession]:
    """The sessions among a body's arguments. A lazy resource's is started here: there is work for it."""
    for value in values:
        if is_session(value) or is_resource(value):
            yield session_of(value)


def is_connect(session: SparkSession) -> bool:
    """Whether the session is a client of Spark Connect."""
    return type(session).__module__.startswith("pyspark.sql.connect")


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """A new SparkContext takes SIGINT for itself, by which Dagster ends steps: give it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and signal.getsignal(signal.SIGINT) is not before:
            signal.signal(signal.SIGINT, before)
