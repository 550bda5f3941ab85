"""Asset checks on a queue: what should be true of it, and what to do when it is not."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dagster as dg

from omnirelay_dagster.look import QueueLook, look_at, queue_asset_key, shown
from omnirelay_dagster.requirements import UsesQueue, using_queue

DEFAULT_MAX_LAG = 10_000
_MOST_OWNERS = 20


class Verdict(NamedTuple):
    """What a check says of one look. The description is for people and holds nothing that came from outside."""

    passed: bool
    description: str
    metadata: dict[str, Any]


class Rule(NamedTuple):
    """One thing that should be true of a queue."""

    name: str
    severity: dg.AssetCheckSeverity
    description: str
    judge: Callable[[QueueLook, int], Verdict]


def _no_expired_leases(look: QueueLook, max_lag: int) -> Verdict:
    expired = len(look.expired)
    metadata = {"expired": expired, "owners": _owners(lease.owner_peer_id for lease in look.expired)}
    if not expired:
        return Verdict(True, "Every lease is alive.", metadata)
    return Verdict(
        False,
        f"{_count(expired, 'lease')} ran out and nobody has taken the work over. The next worker that leases will; "
        "if none does, see that the work sensor is on and that runs can start.",
        metadata,
    )


def _dead_letters_empty(look: QueueLook, max_lag: int) -> Verdict:
    dead = look.stats.dead
    if not dead:
        return Verdict(True, "There are no dead letters.", {"dead": dead})
    return Verdict(
        False,
        f"{_count(dead, 'dead letter')}: work that used up its attempts or was given up. Read the errors with "
        "queue.dead_letters(), mend the cause, then launch the job that requeues dead letters, or purge them with "
        "queue.purge_dead().",
        {"dead": dead},
    )


def _backpressure_clear(look: QueueLook, max_lag: int) -> Verdict:
    metadata = {"depth": look.stats.pending, "backpressure": look.stats.backpressure}
    if not look.stats.backpressure:
        return Verdict(True, "The queue takes work.", metadata)
    return Verdict(
        False,
        "The queue is above its high watermark and refuses new work until it has fallen to the low one. Let more runs "
        "work on it, slow down what enqueues, or raise high_watermark on the LeaseQueueResource.",
        metadata,
    )


def _replication_lag(look: QueueLook, max_lag: int) -> Verdict:
    lag = look.reader_lag
    metadata = {"lag": lag, "max_lag": max_lag, "head": look.stats.head, "readers": len(look.readers)}
    if lag <= max_lag:
        said = "Every reader of the log keeps up." if look.readers else "Nobody is registered to read the log."
        return Verdict(True, said, metadata)
    return Verdict(
        False,
        f"The slowest reader of the log is {lag} events behind; {max_lag} are allowed. See that its sensor or relay "
        "is on and gets on. If it is gone for good, queue.drop_reader(name) lets the log be pruned again.",
        {**metadata, "slowest": shown(min(look.readers, key=lambda name: look.readers[name]))},
    )


def _peers_healthy(look: QueueLook, max_lag: int) -> Verdict:
    silent, ended = look.silent_owners, look.ended_owners
    metadata = {
        "owners": len({lease.owner_peer_id for lease in look.leases}),
        "silent": _owners(silent),
        "run_is_over": _owners(ended),
    }
    if not silent and not ended:
        return Verdict(True, "Whoever holds leases is alive.", metadata)
    return Verdict(
        False,
        f"Owners that let all their leases run out: {len(silent)}. Owners with leases for a run that is over: "
        f"{len(ended)}. Once sure that the process is gone, launch the job that releases an owner; should it live, "
        "nothing that it publishes afterwards is accepted.",
        metadata,
    )


RULES = (
    Rule(
        "no_expired_leases",
        dg.AssetCheckSeverity.WARN,
        "No lease has run out without its work being taken over. If it fails: see that the work sensor is on and "
        "that runs can start.",
        _no_expired_leases,
    ),
    Rule(
        "dead_letters_empty",
        dg.AssetCheckSeverity.ERROR,
        "No item was given up. If it fails: read the errors, mend the cause, requeue the dead letters.",
        _dead_letters_empty,
    ),
    Rule(
        "backpressure_clear",
        dg.AssetCheckSeverity.WARN,
        "The queue takes work. If it fails: add workers, slow down what enqueues, or raise the high watermark.",
        _backpressure_clear,
    ),
    Rule(
        "replication_lag",
        dg.AssetCheckSeverity.WARN,
        "Every reader registered with the log is near its end. If it fails: see that the reader's sensor or relay "
        "is on, or drop a reader that is gone.",
        _replication_lag,
    ),
    Rule(
        "peers_healthy",
        dg.AssetCheckSeverity.WARN,
        "Whoever holds leases beats for them, and its run goes on. If it fails: release the owner that is gone.",
        _peers_healthy,
    ),
)


def build_queue_checks(
    queue: str, *, asset_key: dg.AssetKey | None = None, max_lag: int = DEFAULT_MAX_LAG
) -> dg.AssetChecksDefinition:
    """The five checks on the asset of the resource ``queue``, evaluated together from one look at it.

    ``max_lag`` is how many events the slowest registered reader of the log may be behind.
    """
    key = asset_key or queue_asset_key(queue)
    specs = [dg.AssetCheckSpec(rule.name, asset=key, description=rule.description) for rule in RULES]

    @dg.multi_asset_check(name=f"{queue}_queue_checks", specs=specs, can_subset=True, required_resource_keys={queue})
    def check(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        look = look_at(getattr(context.resources, queue).get_queue(), context.instance)
        wanted = {each.name for each in context.selected_asset_check_keys}
        for rule in RULES:
            if rule.name in wanted:
                verdict = rule.judge(look, max_lag)
                yield dg.AssetCheckResult(asset_key=key, check_name=rule.name, **_told(rule, verdict))

    made: dg.AssetChecksDefinition = using_queue(check, UsesQueue(queue))
    return made


def evaluate(look: QueueLook, key: dg.AssetKey, max_lag: int) -> list[dg.AssetCheckEvaluation]:
    """What all of the checks say of one look, for a sensor to report without a run."""
    return [
        dg.AssetCheckEvaluation(asset_key=key, check_name=rule.name, **_told(rule, rule.judge(look, max_lag)))
        for rule in RULES
    ]


def _told(rule: Rule, verdict: Verdict) -> dict[str, Any]:
    return {
        "passed": verdict.passed,
        "severity": rule.severity,
        "description": verdict.description,
        "metadata": verdict.metadata,
    }


def _owners(owners: Any) -> list[str]:
    """Names of owners, in order and fit to be shown; the first of them if there are many."""
    names = [shown(owner) for owner in sorted(set(owners))]
    return names if len(names) <= _MOST_OWNERS else [*names[:_MOST_OWNERS], f"and {len(names) - _MOST_OWNERS} more"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
