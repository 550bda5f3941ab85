"""The log, elsewhere: a versioned wire form of its events, a relay that delivers them, and sinks that keep them.

Depends on the model only, so that anything can publish and consume events without a queue.
"""

from lease_core.replication.archive import WithArchive, prune_archived
from lease_core.replication.backoff import Backoff
from lease_core.replication.batch import Batch
from lease_core.replication.checkpoints import FileCheckpoints, MemoryCheckpoints
from lease_core.replication.codec import decode_event, decode_events, encode_event, encode_events, json_schema
from lease_core.replication.contract import EventSource, Sink, each_event
from lease_core.replication.errors import (
    CorruptCopy,
    HistoryDiffers,
    RefusedForGood,
    SinkUnavailable,
    UnreadableEvent,
)
from lease_core.replication.hub import HubCopy, HubFollower, HubServer, MergedEvent, follow_hub, read_hub
from lease_core.replication.lane import Rules, SinkStatus
from lease_core.replication.refused import RefusedEvents
from lease_core.replication.relay import Relay
from lease_core.replication.sinks.combine import fan_out, with_shard
from lease_core.replication.sinks.http import HttpSink
from lease_core.replication.sinks.hub import HubSink
from lease_core.replication.sinks.jsonl import JsonlSink, read_jsonl
from lease_core.replication.sinks.memory import MemorySink
from lease_core.replication.sinks.nats import NatsSink
from lease_core.replication.sinks.object_store import ObjectStoreSink, read_segments
from lease_core.replication.sinks.openlineage import OpenLineageSink
from lease_core.replication.sinks.sql import SqlSink, read_sql

__all__ = [
    "Backoff",
    "Batch",
    "CorruptCopy",
    "EventSource",
    "FileCheckpoints",
    "HistoryDiffers",
    "HttpSink",
    "HubCopy",
    "HubFollower",
    "HubServer",
    "HubSink",
    "JsonlSink",
    "MemoryCheckpoints",
    "MemorySink",
    "MergedEvent",
    "NatsSink",
    "ObjectStoreSink",
    "OpenLineageSink",
    "RefusedEvents",
    "RefusedForGood",
    "Relay",
    "Rules",
    "Sink",
    "SinkStatus",
    "SinkUnavailable",
    "SqlSink",
    "UnreadableEvent",
    "WithArchive",
    "decode_event",
    "decode_events",
    "each_event",
    "encode_event",
    "encode_events",
    "fan_out",
    "follow_hub",
    "json_schema",
    "prune_archived",
    "read_hub",
    "read_jsonl",
    "read_segments",
    "read_sql",
    "with_shard",
]
