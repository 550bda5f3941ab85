"""Jobs for operators, to be launched from the launchpad: requeue, drain, restore, release."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from lease_core import LeaseQueue
from omnirelay_dagster.look import DAGSTER_PEER, shown
from omnirelay_dagster.pending_file import drain_to_file, restore_from_file
from omnirelay_dagster.requirements import QueueOp, UsesQueue

_AT_ONCE = 1_000
_MOST_LEASES = 100_000


class RequeueDeadLetters(dg.Config):
    """Which dead letters get all of their attempts again."""

    ids: list[int] = Field([], description="sequence ids of the dead letters; none means all that are dead now")
    limit: int | None = Field(None, description="the most to requeue, oldest first; by default there is no limit", ge=1)


class DrainToFile(dg.Config):
    """What leaves the queue, and where to."""

    path: str = Field(description="the file to make, one JSON document a line; it must not exist yet")
    limit: int | None = Field(None, description="the most items to take, in the order of leasing; by default all", ge=1)
    include_drained: bool = Field(
        False, description="also write items that earlier drains took out, such as one that was killed halfway"
    )


class RestoreFromFile(dg.Config):
    """What goes back into the queue. Restoring twice is restoring once."""

    path: str = Field(description="a file that a drain has made, from this queue or another one")


class ReleaseOwner(dg.Config):
    """Whose leases are handed back at once. Use it for an owner that is gone."""

    owner: str = Field(
        description="the owner as the queue asset's table of leases names it, or the id of a Dagster run for all of "
        "its steps",
        min_length=1,
    )


def build_operator_jobs(queue: str) -> list[dg.JobDefinition]:
    """Four jobs on the resource ``queue``, named after it. What each did is in the metadata of its op's output."""
    return [
        _job(
            queue,
            "requeue_dead_letters",
            "Gives dead letters all of their attempts again.",
            RequeueDeadLetters,
            _requeue_dead_letters,
        ),
        _job(
            queue,
            "drain_to_file",
            "Moves waiting items to a file. Leased items stay, and the queue goes on working.",
            DrainToFile,
            _drain_to_file,
        ),
        _job(
            queue,
            "restore_from_file",
            "Puts the items of a drained file back. Items that are there already are left alone.",
            RestoreFromFile,
            _restore_from_file,
        ),
        _job(
            queue,
            "release_owner",
            "Hands back everything that an owner holds. Whatever it publishes afterwards is refused.",
            ReleaseOwner,
            _release_owner,
        ),
    ]


def _requeue_dead_letters(queue: LeaseQueue, config: RequeueDeadLetters, principal: str) -> dict[str, Any]:
    size = min(_AT_ONCE, queue.config.max_batch)
    requeued = 0
    if config.ids:
        wanted = sorted(set(config.ids))[: config.limit]
        for start in range(0, len(wanted), size):
            requeued += len(queue.requeue_dead(wanted[start : start + size], principal=principal))
        return {"requeued": requeued, "passed_over": len(wanted) - requeued, "still_dead": queue.stats().dead}
    after = 0  # going by id, so that an item that dies again meanwhile is not met again
    while config.limit is None or requeued < config.limit:
        left = size if config.limit is None else min(size, config.limit - requeued)
        page = queue.dead_letters(after, left)
        if not page:
            break
        requeued += len(queue.requeue_dead(page, principal=principal))
        after = page[-1].sequence_id
    return {"requeued": requeued, "passed_over": 0, "still_dead": queue.stats().dead}


def _drain_to_file(queue: LeaseQueue, config: DrainToFile, principal: str) -> dict[str, Any]:
    path = Path(config.path).absolute()
    drained = drain_to_file(queue, path, config.limit, include_drained=config.include_drained, principal=principal)
    return {
        "drained": drained.items,
        "drained_earlier": drained.earlier,
        "file": dg.MetadataValue.path(path),
        "bytes": path.stat().st_size,
        "depth": queue.stats().pending,
    }


def _restore_from_file(queue: LeaseQueue, config: RestoreFromFile, principal: str) -> dict[str, Any]:
    path = Path(config.path).absolute()
    restored = restore_from_file(queue, path, principal=principal)
    return {
        "restored": restored.items,
        "already_there": restored.duplicates,
        "file": dg.MetadataValue.path(path),
        "depth": queue.stats().pending,
    }


def _release_owner(queue: LeaseQueue, config: ReleaseOwner, principal: str) -> dict[str, Any]:
    held = {lease.owner_peer_id for lease in queue.leases(_MOST_LEASES, bodies=False)}
    of_run = f"{DAGSTER_PEER}{config.owner.removeprefix(DAGSTER_PEER)}/"
    owners = sorted(owner for owner in held if owner == config.owner or owner.startswith(of_run))
    released = sum(queue.release_owner(owner, principal=principal) for owner in owners or [config.owner])
    return {"released": released, "owners": [shown(owner) for owner in owners], "depth": queue.stats().pending}


def _job(
    queue: str,
    duty: str,
    description: str,
    config: type[dg.Config],
    act: Callable[[LeaseQueue, Any, str], dict[str, Any]],
) -> dg.JobDefinition:
    """A job of one op. Its output is nothing but metadata, so that no IO manager has a part in it."""
    name = f"{queue}_{duty}"

    def compute(context: dg.OpExecutionContext, config: Any) -> dg.Output[None]:
        leases = getattr(context.resources, queue).get_queue()
        found = act(leases, config, f"{DAGSTER_PEER}{context.run_id}/{name}")
        context.log.info(", ".join(f"{key}: {_plain(value)}" for key, value in found.items()))
        return dg.Output(None, metadata=found)

    compute.__annotations__["config"] = config
    plain = dg.op(name=f"{name}_op", description=description, required_resource_keys={queue}, out=dg.Out(dg.Nothing))
    op = QueueOp(plain(compute), UsesQueue(queue))

    @dg.job(name=name, description=description, executor_def=dg.in_process_executor, tags={"omnirelay/queue": queue})
    def job() -> None:
        op()

    return job


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value
