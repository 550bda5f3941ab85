"""The ``omnirelay`` command.

A subcommand is a module with ``HELP``, ``arguments(parser)`` and ``run(options)``, named by an entry point in the group
``omnirelay.commands``. So a package that builds on this one adds its own, and only the one asked for is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lease_core.errors import LeaseError

GROUP = "omnirelay.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``omnirelay COMMAND ...``. What a user can act on is said in a line, with exit code 2, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {command.name: command for command in entry_points(group=GROUP)}
    asked = given[0] if given else "--help"
    parser = argparse.ArgumentParser(prog="omnirelay", description="Tend a lease queue, its log and the copies of it.")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name in sorted(commands) if asked.startswith("-") else [asked]:
        if name not in commands:
            parser.error(f"no command {name!r}; there are {', '.join(sorted(commands))}")
        _add(subparsers, name, commands[name])
    options = parser.parse_args(given or ["--help"])
    try:
        return int(options.run(options))
    except LeaseError as error:
        return _refuse(asked, str(error))
    except OSError as error:  # of a path that was given; the system says which
        where = f"{error.filename}: " if error.filename else ""
        return _refuse(asked, f"{where}{error.strerror or error}; check the path and its permissions")
    except KeyboardInterrupt:
        return 130


def _refuse(asked: str, reason: str) -> int:
    print(f"omnirelay {asked}: {reason}", file=sys.stderr)
    return 2


def _add(subparsers: Any, name: str, entry: EntryPoint) -> None:
    try:
        command = entry.load()
    except ImportError as error:
        subparsers.add_parser(name, help=f"not usable here: {error}")
        return
    subparser = subparsers.add_parser(name, help=command.HELP, description=command.__doc__)
    command.arguments(subparser)
    subparser.set_defaults(run=command.run)
