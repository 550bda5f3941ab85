"""Write a queue as it stands to a file, from which a copy can start, while others go on using it."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from lease_core.cli.sources import namespace_argument, open_queue
from lease_core.recovery import snapshot

HELP = "write a queue as it stands to a file"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="the queue's database: sqlite:///path or postgresql://…")
    parser.add_argument("file", help="where to write it")
    namespace_argument(parser)


def run(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        made = snapshot(open_queue(options.url, options.namespace, stack), options.file)
    print(f"{options.file}: {made.namespace} as of event {made.sequence_number}")
    return 0
