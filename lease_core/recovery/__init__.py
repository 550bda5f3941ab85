"""Getting a queue back: rebuilt from a copy of its log, started from a snapshot, or taken over by a standby."""

from lease_core.recovery.progress import Progress
from lease_core.recovery.rebuild import rebuild
from lease_core.recovery.snapshot import Snapshot, snapshot
from lease_core.recovery.standby import Standby
from lease_core.recovery.superseding import supersede
from lease_core.recovery.verify import Report, verify

__all__ = ["Progress", "Report", "Snapshot", "Standby", "rebuild", "snapshot", "supersede", "verify"]
