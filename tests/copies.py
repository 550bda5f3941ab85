"""A queue with a little past, and copies of its log, for commands to work on."""

from __future__ import annotations

from pathlib import Path

from lease_core import LeaseQueue, WorkItem
from lease_core.replication import JsonlSink, ObjectStoreSink, Relay, Rules, SqlSink


def queue_with_copies(folder: Path) -> str:
    """The url of a queue with five events, whose log is in ``lines``, ``objects`` and ``table.db``, too."""
    url = f"sqlite:///{folder}/queue.db"
    sinks = [
        JsonlSink(folder / "lines"),
        ObjectStoreSink((folder / "objects").as_uri()),
        SqlSink(f"sqlite:///{folder}/table.db", source="eu"),
    ]
    with LeaseQueue.open(url, "landing") as queue:
        queue.enqueue([WorkItem("file", name) for name in "abc"])
        queue.complete(queue.lease("worker"))
        relay = Relay(queue, sinks, rules=Rules(linger=0))
        relay.run_once()
        relay.stop()
    return url
