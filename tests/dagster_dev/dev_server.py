"""A real `dagster dev`: webserver, daemon and code servers, which can be stopped, killed and started again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[2]
PATIENCE = 400.0

_SETTINGS: Mapping[str, Any] = {
    "telemetry": {"enabled": False},
    "nux": {"enabled": False},
    # would be two more Python processes for each step
    "compute_logs": {
        "module": "dagster.core.storage.noop_compute_log_manager",
        "class": "NoOpComputeLogManager",
    },
    "auto_materialize": {"enabled": False},
    "run_monitoring": {"enabled": True, "poll_interval_seconds": 2},
    "run_coordinator": {
        "module": "dagster.core.run_coordinator",
        "class": "QueuedRunCoordinator",
        "config": {"dequeue_interval_seconds": 1},
    },
}
_READY = """{
  workspaceOrError { ... on Workspace { locationEntries {
    name loadStatus locationOrLoadError { __typename ... on PythonError { message } } } } }
  instance { daemonHealth { allDaemonStatuses { daemonType required healthy } } }
}"""


class DagsterDev:
    """`dagster dev` on code locations given as modules, with a home and a port of its own."""

    def __init__(
        self, home: Path, modules: Sequence[str], environment: Mapping[str, str], storage: Mapping[str, Any] | None
    ) -> None:
        self.home = home
        self.log = home / "dagster.log"
        self.modules = modules
        self._port = _free_port()
        self._dagster_home = home / "dagster"
        self._dagster_home.mkdir(parents=True)
        settings = {**_SETTINGS, **({"storage": storage} if storage else {})}
        (self._dagster_home / "dagster.yaml").write_text(yaml.safe_dump(settings))
        self._environment = {**os.environ, **environment, "DAGSTER_HOME": str(self._dagster_home)}
        self._process: subprocess.Popen[bytes] | None = None
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=30.0)

    def start(self) -> DagsterDev:
        """Return once the webserver answers, all code locations are loaded and all daemons are at work."""
        locations = [argument for module in self.modules for argument in ("-m", module)]
        command = ["-m", "dagster", "dev", "--host", "127.0.0.1", "--port", str(self._port), *locations]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_with_default_signals,
            )
        try:
            self.until(self._is_ready, every=0.5)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self) -> None:
        """As a person would, with Ctrl-C. What does not end by that is killed."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        self.kill()

    def kill(self) -> None:
        """SIGKILL everything that belongs to this instance, as the death of the machine would: runs and steps too."""
        while left := self.processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if self._process is not None:
                self._process.poll()
            psutil.wait_procs(left, timeout=1)
        if self._process is not None:
            self._process.wait()

    def processes(self) -> list[psutil.Process]:
        """All living processes of the instance, orphans included: they are known by their environment."""
        own = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                known = process.environ().get("DAGSTER_HOME") == self._environment["DAGSTER_HOME"]
                if known and process.status() != psutil.STATUS_ZOMBIE:
                    own.append(process)
        return own

    def limit_runtime(self, run: str, seconds: int) -> None:
        """Give a run that is at work a time limit, which run monitoring will see. GraphQL has no way to do that."""
        with dg.DagsterInstance.from_config(str(self._dagster_home)) as instance:
            instance.add_run_tags(run, {dg.MAX_RUNTIME_SECONDS_TAG: str(seconds)})

    def ask(self, query: str, **variables: Any) -> Any:
        """The answer to a GraphQL query."""
        answer = self._client.post("/graphql", json={"query": query, "variables": variables}).json()
        assert not answer.get("errors"), answer["errors"]
        return answer["data"]

    def until(self, true: Callable[[], bool], every: float = 0.2) -> None:
        """Wait for a condition; what the instance logged is shown if it does not come to pass."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            alive = self._process is not None and self._process.poll() is None
            if not alive or time.monotonic() > deadline:
                tail = self.log.read_text(errors="replace")[-6000:]
                raise AssertionError(f"{'it took too long' if alive else 'dagster dev ended'}; its log ends:\n{tail}")
            time.sleep(every)  # often enough; asking more often would keep the instance from its work

    def _is_ready(self) -> bool:
        try:
            answer = self.ask(_READY)
        except httpx.TransportError:
            return False
        entries = answer["workspaceOrError"]["locationEntries"]
        for entry in entries:
            problem = (entry["locationOrLoadError"] or {}).get("message")
            assert problem is None, f"{entry['name']} does not load: {problem}"
        daemons = answer["instance"]["daemonHealth"]["allDaemonStatuses"]
        return (
            len(entries) == len(self.modules)
            and all(entry["loadStatus"] == "LOADED" for entry in entries)
            and all(daemon["healthy"] for daemon in daemons if daemon["required"])
        )


def _with_default_signals() -> None:
    """Who is started from a shell's background ignores SIGINT and hands that on; and nobody shall outlive the tests."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGINT, 0, 0, 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
