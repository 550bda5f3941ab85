"""The relay's configuration: a TOML file, overridden by the environment.

    [relay]                         # what to read, and how
    url = "sqlite:///fabric.db"
    namespace = "resourcelease"
    interval = 0.25
    refused = "refused.jsonl"

    [sinks.archive]                 # one table a sink; its name is the sink's
    type = "objects"
    url = "s3://bucket/fabric"
    batch_size = 5000

``OMNIRELAY_RELAY__URL`` overrides ``relay.url``, ``OMNIRELAY_SINKS__ARCHIVE__ENABLED=false`` the sink's ``enabled``,
and so on: two underscores between the parts. ``${NAME}`` in a value of the file stands for a variable of the
environment, so that secrets need not be in it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lease_core.errors import InvalidConfig
from lease_core.replication.backoff import Backoff
from lease_core.replication.contract import Sink
from lease_core.replication.lane import Rules
from lease_core.replication.sinks.registry import make_sink

PREFIX = "OMNIRELAY_"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class RelaySettings(BaseModel):
    """What is read and how. Durations are in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    url: str = Field(min_length=1, repr=False)
    namespace: str = Field("resourcelease", min_length=1)
    interval: float = Field(0.25, gt=0, le=3_600)
    refused: Path | None = None
    stop_timeout: float = Field(30.0, gt=0)


class SinkSettings(BaseModel):
    """How one sink is served; every other key of its table is an option of the sink itself."""

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    type: str = Field(min_length=1)
    enabled: bool = True
    shard: str | None = Field(None, min_length=1)
    batch_size: int = Field(1_000, ge=1, le=100_000)
    on_refusal: Literal["stop", "skip"] = "stop"
    start: Literal["beginning", "oldest", "end"] = "beginning"
    linger: float | None = Field(None, ge=0)
    checkpoint_every: float = Field(1.0, ge=0)
    retry_first: float = Field(0.2, gt=0)
    retry_most: float = Field(60.0, gt=0)

    def rules(self) -> Rules:
        return Rules(
            self.batch_size,
            self.on_refusal,
            self.start,
            self.linger,
            self.checkpoint_every,
            Backoff(self.retry_first, self.retry_most),
        )


class Settings(BaseModel):
    """The whole of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    relay: RelaySettings
    sinks: dict[str, SinkSettings] = Field(min_length=1)

    def enabled(self) -> dict[str, SinkSettings]:
        return {name: sink for name, sink in self.sinks.items() if sink.enabled}

    def make_sinks(self) -> list[Sink]:
        """The enabled sinks. Raises ``InvalidConfig`` if there is none, or one cannot be made."""
        from lease_core.replication.sinks.combine import with_shard

        if not self.enabled():
            raise InvalidConfig("sinks", "none is enabled")
        made = []
        for name, settings in self.enabled().items():
            sink = make_sink(settings.type, name, dict(settings.model_extra or {}))
            made.append(with_shard(sink, settings.shard) if settings.shard else sink)
        return made

    def rules(self) -> dict[str, Rules]:
        return {name: sink.rules() for name, sink in self.enabled().items()}


def load_settings(
    path: str | os.PathLike[str] | None, environment: Mapping[str, str] | None = None, *, source: str | None = None
) -> Settings:
    """The settings of the file (if there is one) and the environment. Raises ``InvalidConfig``, naming the field.

    ``source`` stands for ``relay.url`` where the queue is known already, and only the sinks are asked for.
    """
    tree = read_tree(path, environment, ("relay", "sinks"))
    if source is not None and isinstance(tree.setdefault("relay", {}), dict):
        tree["relay"]["url"] = source
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidConfig(".".join(map(str, first["loc"])), first["msg"]) from None


def read_tree(
    path: str | os.PathLike[str] | None, environment: Mapping[str, str] | None, tables: tuple[str, ...]
) -> dict[str, Any]:
    """The file as a tree, with what the environment says of these tables put into it."""
    environment = os.environ if environment is None else environment
    tree = {} if path is None else _read(Path(path), environment)
    for name, value in sorted(environment.items()):
        parts = name.removeprefix(PREFIX).lower().split("__") if name.startswith(PREFIX) else []
        if len(parts) > 1 and parts[0] in tables:
            _put(tree, parts, value)
    return tree


def _read(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidConfig("config", f"{path} cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig("config", f"{path} is not TOML: {error}") from None
    filled: dict[str, Any] = _fill(tree, environment, "")
    return filled


def _fill(value: Any, environment: Mapping[str, str], where: str) -> Any:
    match value:
        case dict():
            return {key: _fill(each, environment, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
        case list():
            return [_fill(each, environment, where) for each in value]
        case str():
            for name in _VARIABLE.findall(value):
                if name not in environment:
                    raise InvalidConfig(where, f"${{{name}}} is not set in the environment")
            return _VARIABLE.sub(lambda found: environment[found.group(1)], value)
        case _:
            return value


def _put(tree: dict[str, Any], parts: list[str], value: str) -> None:
    """Set one value of the tree; a name that is there in other letters is that one."""
    for depth, part in enumerate(parts):
        key = next((each for each in tree if each.lower() == part), part)
        if depth == len(parts) - 1:
            tree[key] = value
            return
        below = tree.setdefault(key, {})
        if not isinstance(below, dict):
            raise InvalidConfig(".".join(parts), "is not a table in the file")
        tree = below
