"""Write a queue as it stands to a file, from which a copy can start, while others go on using it."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from lease_core.cli.sources import namespace_argument, open_queue
from lease_core.errors import InvalidInput
from lease_core.recovery import snapshot

HELP = "write a queue as it stands to a file"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the queue's database: sqlite:///path or postgresql://…")
    parser.add_argument("file", help="where to write it")
    namespace_argument(parser)


def run(options: argparse.Namespace) -> int:
    folder = Path(options.file).absolute().parent
    if not folder.is_dir():
        raise InvalidInput("file", f"the directory {folder} does not exist; create it, or change the path")
    with ExitStack() as stack:
        queue = open_queue(options.url, options.namespace, stack)
        try:
            made = snapshot(queue, options.file)
        except OSError as error:
            said = error.strerror or error
            raise InvalidInput("file", f"{options.file} cannot be written ({said}); change that, or the path") from None
    print(f"{options.file}: {made.namespace} as of event {made.sequence_number}")
    return 0
