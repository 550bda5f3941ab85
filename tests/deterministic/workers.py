"""What other processes do in these tests."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lease_core import LeaseQueue, LeaseToken, QueueConfig
from lease_core.deterministic import EffectStore, Fence, StaleFence, StateStore, VersionGate
from tests.kills.forks import context


def die() -> None:
    """The process is gone, at once and for real."""
    os.kill(os.getpid(), signal.SIGKILL)


def race(act: Callable[..., Any], *arguments: Any, racers: int = 4) -> list[Any]:
    """Run ``act(number, barrier, ...)`` in so many processes, which start together. Gives what each returned."""
    barrier = context.Barrier(racers)
    lines = []
    for number in range(racers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_tell, args=(theirs, act, number, barrier, arguments), daemon=True)
        process.start()
        theirs.close()
        lines.append((process, ours))
    answers = []
    for process, line in lines:
        assert line.poll(60), "a racer did not finish"
        answers.append(line.recv())
        process.join()
    wrong = [answer for fine, answer in answers if not fine]
    assert not wrong, wrong[0]
    return [answer for _, answer in answers]


def _tell(line: Connection, act: Callable[..., Any], number: int, barrier: Any, arguments: tuple[Any, ...]) -> None:
    try:
        line.send((True, act(number, barrier, *arguments)))
    except BaseException as error:
        line.send((False, repr(error)))


def add_each(number: int, barrier: Any, url: str, name: str, keys: int) -> list[tuple[int, bool]]:
    """Add every key. Gives whose value each has, and whether it was added here."""
    with StateStore.open(url) as store:
        barrier.wait(30)
        return [tuple(store.add(f"{name}/{key}", number)) for key in range(keys)]  # type: ignore[misc]


def put_fenced(number: int, barrier: Any, url: str, name: str, fences: int) -> int:
    """Put fence numbers under one key, each with that fence, in an order of one's own. Gives how many were refused."""
    order = list(range(fences))
    random.Random(number).shuffle(order)
    refused = 0
    with StateStore.open(url) as store:
        barrier.wait(30)
        for fence in order:
            try:
                store.put(f"{name}/value", fence, fence=Fence(name, LeaseToken(1, 1, "lease", fence)))
            except StaleFence:
                refused += 1
    return refused


def run_each(number: int, barrier: Any, url: str, name: str, effects: int) -> list[int]:
    """Run every effect with an outcome of one's own. Gives the outcomes that were answered."""
    with StateStore.open(url) as store:
        barrier.wait(30)
        return [EffectStore(store).run_once(f"{name}/seq/{n}", lambda: number) for n in range(effects)]


def run_renamed(number: int, barrier: Any, url: str, name: str, effects: int) -> list[int]:
    """As above, while ids are renamed: half of the workers know the old name only, the others both."""
    with StateStore.open(url) as store:
        store_ = EffectStore(store)
        barrier.wait(30)
        if number % 2:
            return [store_.run_once(f"{name}/old/seq/{n}", lambda: number) for n in range(effects)]
        return [
            store_.run_once(f"{name}/new/seq/{n}", lambda: number, formerly=f"{name}/old/seq/{n}")
            for n in range(effects)
        ]


def pin_each(number: int, barrier: Any, url: str, name: str, changes: int) -> list[int]:
    with StateStore.open(url) as store:
        gate = VersionGate(store)
        barrier.wait(30)
        return [gate.version(f"{name}/{n}", 0, 9, initial=number) for n in range(changes)]


def run_and_die(url: str, effect_id: str, journal: Path, at: str) -> str:
    """Run an effect that leaves a mark in a file, and die at the named point."""
    with StateStore.open(url) as store:
        effects = EffectStore(store)

        def effect() -> str:
            if at == "before":
                die()
            with journal.open("a") as file:
                file.write("begun\n")
            if at == "during":
                die()
            with journal.open("a") as file:
                file.write("done\n")
            if at == "after":
                die()
            return "done"

        outcome = effects.run_once(effect_id, effect)
        if at == "recorded":
            die()
        return outcome


def die_while_placing(url: str, key: str, function: str) -> None:
    """Add to a folder, and die at the moment when the system call is made."""
    with StateStore.open(url) as store:
        setattr(os, function, lambda *_: die())
        store.add(key, "half")


def hold_lock(url: str, key: str, line: Connection) -> None:
    from lease_core.deterministic.file_state import FileStateStore

    store = StateStore.open(url)
    assert isinstance(store, FileStateStore)
    with store._locked("values", key):
        line.send("locked")
        line.recv()


def work_as_zombie(url: str, namespace: str, state: str | None, duration: float, line: Connection) -> None:
    """Lease an item, begin an effect, say so, and when told to go on try to record it."""
    store = StateStore.open(state) if state else None
    with LeaseQueue.open(url, namespace, QueueConfig(lease_duration=duration), effects=store) as queue:
        [lease] = queue.lease("zombie", wait=30)

        def effect() -> str:
            line.send("begun")
            line.recv()
            return "zombie"

        try:
            line.send(lease.effects.run_once("charge", effect))
        except StaleFence as refused:
            line.send(refused.code)


def apply_and_die(url: str, namespace: str, change_id: str, fatal: int, when: str) -> None:
    """Deliver a log to a transactional sink whose handler dies at one of the events, or right before the commit."""
    import sqlalchemy as sa

    from lease_core.deterministic import TransactionalSink

    engine = sa.create_engine(url)

    def handler(event: Any, connection: sa.Connection) -> None:
        connection.execute(sa.text("INSERT INTO applied VALUES (:n)"), {"n": event.sequence_number})
        if when == "handler" and event.sequence_number == fatal:
            die()

    if when == "commit":
        sa.event.listen(engine, "commit", lambda _: die())
    with LeaseQueue.open(url, namespace) as queue, StateStore.open(url) as store:
        sink = TransactionalSink(handler, EffectStore(store), engine, change_id=change_id)
        sink.deliver(queue.events())
