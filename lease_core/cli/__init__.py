"""The ``omnirelay`` command. A subcommand is a module with ``HELP``, ``arguments(parser)`` and ``run(options)``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from lease_core.errors import LeaseError

_COMMANDS = {"relay": "lease_core.cli.relay"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="omnirelay", description="Replicate the log of a lease queue.")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for name, module in _COMMANDS.items():
        command = import_module(module)
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.__doc__)
        command.arguments(subparser)
        subparser.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except LeaseError as error:
        print(f"omnirelay: {error}", file=sys.stderr)
        return 2
