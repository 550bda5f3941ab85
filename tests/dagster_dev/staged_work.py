"""What the bodies of the tests' assets do: their items tell them, and they leave a note of who does it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import dagster as dg

from lease_core import WorkItem
from omnirelay_dagster import FencedIOManager, LeasedBatch
from omnirelay_dagster.type_handlers import JsonHandler, TypeHandler
from tests.dagster_dev.surroundings import Surroundings


class Actor(NamedTuple):
    """Who runs a body: the step's process, its parent (the run worker), its run, and the fence of its batch."""

    asset: str
    step: int
    worker: int
    run: str
    fence: int


def item(name: str, do: str = "", number: int = 0) -> WorkItem:
    return WorkItem("file", name, attributes={"do": do, "number": str(number)}, request_id=name)


def act(context: dg.AssetExecutionContext, batch: LeasedBatch, pause: float = 0.0) -> list[dict[str, str]]:
    """Leave a note, do what the items say, and give a row for each of them."""
    asset = context.asset_key.to_user_string()
    actor = Actor(asset, os.getpid(), os.getppid(), context.run.run_id, batch.leases[0].token.fence)
    note = Surroundings.of_this_process().home / "actors" / f"{asset}-{actor.fence}"
    note.parent.mkdir(exist_ok=True)
    note.with_suffix(".new").write_text(json.dumps(actor))
    note.with_suffix(".new").rename(note)
    orders = {each.attributes["do"] for each in batch.items}
    if "wait" in orders:
        wait_for_the_cue(asset)
    if "raise once" in orders and batch.leases[0].token.attempt == 1:
        raise ValueError(f"cannot read {batch.items[0].resource_id}")
    if "give up" in orders:
        raise dg.Failure("nobody can read this", allow_retries=False)
    time.sleep(pause)  # the work itself; long enough to be killed in
    return [{"name": each.resource_id, "number": each.attributes["number"]} for each in batch.items]


def wait_for_the_cue(asset: str) -> None:
    """Wait, but not for ever: whoever was to give the cue may have been killed."""
    deadline = time.monotonic() + 900
    while not (Surroundings.of_this_process().home / "cues" / asset).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody gave {asset} its cue")
        time.sleep(0.02)


def give_cue(home: Path, asset: str) -> None:
    (home / "cues").mkdir(exist_ok=True)
    (home / "cues" / asset).touch()


def take_cue_back(home: Path, asset: str) -> None:
    (home / "cues" / asset).unlink(missing_ok=True)


def actors(home: Path, asset: str) -> list[Actor]:
    """Everybody who has begun to work for an asset, in the order of their leases."""
    notes = [path for path in (home / "actors").glob(f"{asset}-*") if path.suffix != ".new"]
    return sorted((Actor(*json.loads(path.read_text())) for path in notes), key=lambda actor: actor.fence)


class SlowToPublish(JsonHandler):
    """Writes its file and then waits for the cue, so that a test can do something before the lease is completed."""

    def write(self, value: Any, fs: Any, path: str) -> int:
        rows = super().write(value, fs, path)
        (Surroundings.of_this_process().home / "written").mkdir(exist_ok=True)
        (Surroundings.of_this_process().home / "written" / str(os.getpid())).write_text(path)
        wait_for_the_cue("publish")
        return rows


class SlowToPublishIOManager(FencedIOManager):
    handlers: ClassVar[tuple[TypeHandler, ...]] = (SlowToPublish(),)
