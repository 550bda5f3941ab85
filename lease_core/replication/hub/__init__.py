"""The hub: one place for the logs of many queues, over gRPC.

Sources stream batches of events in; the hub keeps them, says what is missing, and serves each source's log, or all of
them merged. ``hub.proto`` describes the service for clients in other languages.
"""

from lease_core.replication.hub.copy import HubCopy, read_hub
from lease_core.replication.hub.follow import HubFollower, MergedEvent, follow_hub
from lease_core.replication.hub.server import HubServer

__all__ = ["HubCopy", "HubFollower", "HubServer", "MergedEvent", "follow_hub", "read_hub"]
