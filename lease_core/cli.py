"""The ``omnirelay`` command. A subcommand is a function that takes its arguments and gives an exit code.

Subcommands are entry points of the group ``omnirelay.commands``, so that a package that builds on this one adds its own
without being imported here, and none is imported before it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from inspect import getdoc

from lease_core.errors import LeaseError

GROUP = "omnirelay.commands"
Command = Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``omnirelay COMMAND ...``. Errors that a user can act on are one line and exit code 1, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {command.name: command for command in entry_points(group=GROUP)}
    if not given or given[0] in ("-h", "--help"):
        print(_overview(commands))
        return 0
    name, *rest = given
    if name not in commands:
        print(f"omnirelay: no command {name!r}. There are: {', '.join(sorted(commands))}", file=sys.stderr)
        return 2
    try:
        command: Command = commands[name].load()
        return command(rest)
    except (LeaseError, ImportError) as error:
        print(f"omnirelay {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _overview(commands: dict[str, EntryPoint]) -> str:
    lines = ["usage: omnirelay COMMAND [options]   (omnirelay COMMAND --help says which)", ""]
    for name, command in sorted(commands.items()):
        try:
            summary = (getdoc(command.load()) or "").partition("\n")[0]
        except ImportError as error:
            summary = f"not usable here: {error}"
        lines.append(f"  {name:<10} {summary}")
    return "\n".join(lines)
