"""Where the code locations under test find their queues and outputs: described once, for the runs and for the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from omnirelay_dagster import FencedIOManager, LeaseQueueResource

QUICKLY = 3.0
LEASE_SECONDS = {"storm": QUICKLY, "takeover": QUICKLY, "wreck": QUICKLY}
"""Where leases are to run out within a test. Elsewhere a machine that is busy must not cost any."""


class Surroundings(NamedTuple):
    """A folder for what is published and for notes, and the database that all queues are in."""

    home: Path
    url: str

    @classmethod
    def of_this_process(cls) -> Surroundings:
        return cls(Path(os.environ["PROOF_HOME"]), os.environ["PROOF_URL"])

    def as_environment(self) -> dict[str, str]:
        return {"PROOF_HOME": str(self.home), "PROOF_URL": self.url}

    def queue(self, name: str) -> LeaseQueueResource:
        """A queue whose items can be lost often, and are there again at once."""
        return LeaseQueueResource(
            url=self.url,
            namespace=name,
            auto_migrate=True,
            lease_duration=LEASE_SECONDS.get(name, 60.0),
            retry_delay=0,
            max_attempts=50,
        )

    def outputs(self, queue: str, kind: type[FencedIOManager] = FencedIOManager) -> FencedIOManager:
        """Where the outputs of a queue's assets go, and are read from."""
        return kind(base_path=str(self.home / "published"), queue=self.queue(queue))
