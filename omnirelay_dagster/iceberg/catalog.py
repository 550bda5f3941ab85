"""Opening an Iceberg catalog in a SQL database, also when somebody else opens it for the first time just now."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.store import parse, shown

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

_PATIENCE = 10.0
MISSING = "Iceberg tables need pyiceberg: pip install 'omnirelay-dagster[iceberg]'"


def open_catalog(
    url: str, warehouse: str | os.PathLike[str], *, name: str = "default", properties: Mapping[str, str] | None = None
) -> Catalog:
    """The catalog in the database at ``url``, made if it is not there. Tables go under ``warehouse``.

    ``properties`` are pyiceberg's, such as ``s3.endpoint``. Passwords appear in no error.
    """
    try:
        from pyiceberg.catalog.sql import SqlCatalog
    except ImportError as error:
        raise ImportError(f"{MISSING} ({error})") from error

    address = _address(url)
    given: dict[str, Any] = {"uri": address.render_as_string(hide_password=False), "warehouse": location(warehouse)}
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return SqlCatalog(name, **given, **(properties or {}))
        except sa.exc.DBAPIError as error:
            # Two that open a new catalog at once both make its tables, and the slower one is told off. Once more finds
            # them there. A server that is away is something else, and is said when patience ends.
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"the catalog at {shown(address)} cannot be opened: {error.orig}") from None
            time.sleep(0.05)


def location(warehouse: str | os.PathLike[str]) -> str:
    """The warehouse as an address that every reader understands: a local folder becomes a file:// one."""
    text = os.fspath(warehouse)
    if not text:
        raise InvalidInput("warehouse", "name a folder, or an address such as s3://bucket/prefix")
    return text.rstrip("/") if "://" in text else f"file://{Path(text).absolute()}"


def _address(url: str) -> sa.URL:
    address = parse(url)
    if address.get_backend_name() == "postgresql":
        return address.set(drivername="postgresql+psycopg")
    if not address.database or address.database == ":memory:":
        raise InvalidInput("url", "a catalog in memory is gone with the process; use sqlite:///path/catalog.db")
    Path(address.database).absolute().parent.mkdir(parents=True, exist_ok=True)
    return address if "timeout" in address.query else address.update_query_dict({"timeout": "30"})
