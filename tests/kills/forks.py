"""Processes that cost milliseconds: forked from a warm helper that has imported the queue but opened nothing.

The helper (multiprocessing's fork server) has one thread and no connection, so its children start clean, unlike a
fork of pytest itself. It ends with this process; the children are daemons and end with it, too.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

KILLED = -signal.SIGKILL

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "lease_core",
        "lease_core.store.sqlite",
        "lease_core.store.postgres",
        "lease_core.deterministic.file_state",
        "alembic.command",
        "logging.config",
        "redis",
    ]
)


def start(act: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    process = context.Process(target=act, args=arguments, daemon=True)
    process.start()
    return process


def kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


@contextmanager
def running(act: Callable[..., object], *arguments: Any) -> Iterator[ForkServerProcess]:
    """A process that runs while the block does, and not a moment longer."""
    process = start(act, *arguments)
    try:
        yield process
    finally:
        kill(process)


def apart(act: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> Any:
    """Call ``act`` in a process of its own; its result, or its failure as an AssertionError."""
    ours, theirs = context.Pipe()
    with running(_report, theirs, act, arguments) as process:
        theirs.close()
        if not ours.poll(timeout):
            raise AssertionError(f"{act.__name__} did not finish within {timeout:g} s")
        try:
            fine, value = ours.recv()
        except EOFError:
            process.join()
            raise AssertionError(f"{act.__name__} died with exit code {process.exitcode}") from None
        process.join()
    if not fine:
        raise AssertionError(value)
    return value


def _report(pipe: Connection, act: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, act(*arguments)))
    except BaseException:
        pipe.send((False, f"in another process:\n{traceback.format_exc()}"))
