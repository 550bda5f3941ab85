"""Read a copy of a log from end to end and say where it stops being good. Exits with 1 if it does."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from lease_core.cli.sources import SOURCE_HELP, namespace_argument, open_queue, open_source
from lease_core.errors import EventsPruned, InvalidInput
from lease_core.queue import LeaseQueue
from lease_core.recovery import verify
from lease_core.replication.contract import EventSource
from lease_core.replication.errors import CorruptCopy

HELP = "find damage in a copy of the log, or in the tables"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help=SOURCE_HELP)
    parser.add_argument("--against", metavar="SOURCE", help="another copy, or the queue, that holds the same events")
    parser.add_argument("--tables", metavar="URL", help="a queue whose rows must be what the events make of them")
    parser.add_argument("--after", type=int, default=0, metavar="NUMBER", help="where the log begins, if it was pruned")
    parser.add_argument("--snapshot", metavar="FILE", help="begin with the items as they stand there, if it was pruned")
    parser.add_argument(
        "--lag-allowed", type=int, default=0, metavar="EVENTS", help="by how many the source may be behind the other"
    )
    namespace_argument(parser)


def run(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        source = open_source(options.source, options.namespace, stack)
        other = open_source(options.against, options.namespace, stack) if options.against else None
        tables = open_queue(options.tables, options.namespace, stack) if options.tables else None
        _check_after(source, options.after)
        report = verify(
            source,
            other,
            tables=tables,
            after=options.after,
            snapshot=options.snapshot,
            lag_allowed=options.lag_allowed,
        )
    if report.ok and not report.last_good and not isinstance(source, LeaseQueue):
        raise InvalidInput("source", f"holds no event of namespace {options.namespace!r}; is it the right one?")
    print(report)
    return 0 if report.ok else 1


def _check_after(source: EventSource, after: int) -> None:
    """Refuse to begin beyond the end: nothing would be read there, and nothing found that is wrong."""
    if after < 0:
        raise InvalidInput("--after", f"must be 0 or more (got {after})")
    try:
        if after and not source.events(after - 1, 1):
            raise InvalidInput("--after", f"is {after}, but the log ends before that event; give a number that it has")
    except (EventsPruned, CorruptCopy):
        return  # it reached that far once, or whoever reads it is told of the damage
