"""The hub's configuration: the table ``[hub]`` of a TOML file, overridden by ``OMNIRELAY_HUB__*``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lease_core.errors import InvalidConfig
from lease_core.replication.hub import wire
from lease_core.replication.hub.server import HubServer
from lease_core.replication.settings import read_tree


class HubSettings(BaseModel):
    """Where the hub listens, and what it keeps events in. Paths are of PEM files."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str = Field(min_length=1, repr=False)
    listen: str = "127.0.0.1:8765"
    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False
    most_bytes: int = Field(wire.MOST_BYTES, ge=1_024, le=1 << 30)
    most_pending: int = Field(64 << 20, ge=1_024)
    keep_days: float | None = Field(None, gt=0, allow_inf_nan=False)

    def server(self) -> HubServer:
        options = self.model_dump(exclude={"url", "listen"})
        return HubServer(self.url, self.listen, **options)


def load_hub_settings(
    path: str | os.PathLike[str] | None,
    environment: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> HubSettings:
    """The settings of the file, the environment and what is ``given``, each over the one before."""
    tree = read_tree(path, environment, ("hub",)).get("hub", {})
    if not isinstance(tree, dict):
        raise InvalidConfig("hub", "is not a table in the file")
    chosen = {name: value for name, value in (given or {}).items() if value is not None}
    try:
        return HubSettings.model_validate({**tree, **chosen})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidConfig(".".join(["hub", *map(str, first["loc"])]), first["msg"]) from None
