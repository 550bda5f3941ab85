"""Make a queue anew from a copy of its log. Interrupted, it goes on where it was when it is run again."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from lease_core.cli.rules import rules_arguments, rules_given
from lease_core.cli.sources import SOURCE_HELP, namespace_argument, open_source
from lease_core.recovery import rebuild

HELP = "make a queue from a copy of its log"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help=SOURCE_HELP)
    parser.add_argument("url", help="the database to make the queue in: sqlite:///path or postgresql://…")
    namespace_argument(parser)
    parser.add_argument("--upto", type=int, metavar="NUMBER", help="stop after this event (the last)")
    parser.add_argument("--snapshot", metavar="FILE", help="start from this snapshot")
    parser.add_argument(
        "--leases",
        choices=("keep", "release"),
        default="keep",
        help="what becomes of leases that were active: they stay so until they end, or are handed back at once",
    )
    rules_arguments(parser)


def run(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        source = open_source(options.source, options.namespace, stack)
        queue = rebuild(
            source,
            options.url,
            namespace=options.namespace,
            upto=options.upto,
            snapshot=options.snapshot,
            leases=options.leases,
            config=rules_given(options),
        )
        stats = stack.enter_context(queue).stats()
    print(f"event {stats.head}: {stats.pending} pending, {stats.active} active, {stats.dead} dead")
    return 0
