"""``@leased_asset`` and ``@leased_op``: compute functions that work on leased batches."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import dagster as dg

from lease_core import Lease, LeaseQueue
from omnirelay_dagster.batch import LeasedBatch, give_up
from omnirelay_dagster.io_manager import publish_batch
from omnirelay_dagster.look import owner_of
from omnirelay_dagster.requirements import QueueOp, UsesQueue, using_queue
from omnirelay_dagster.resource import LeaseQueueResource
from omnirelay_dagster.spark.job_group import spark_jobs, stopped_by_signals

P = ParamSpec("P")
R = TypeVar("R")
Body = Callable[..., Any]
OnEmpty = Literal["skip", "wait", "fail"]

_FOR_BODY = ("batch", "lease")


class Leasing(NamedTuple):
    """How a body gets its work."""

    queue: str
    batch_size: int
    per_item: bool
    drain: bool
    by_partition: bool
    on_empty: OnEmpty
    wait: float
    max_batches: int | None
    max_seconds: float | None


def leased_asset(
    *,
    queue: str,
    batch_size: int = 100,
    per_item: bool = False,
    drain: bool = False,
    by_partition: bool = False,
    on_empty: OnEmpty = "skip",
    wait: float = 60.0,
    max_batches: int | None = None,
    max_seconds: float | None = None,
    **arguments: Any,
) -> Callable[[Body], dg.AssetsDefinition]:
    """An asset that leases a batch from the resource ``queue`` and completes it once its output is stored.

    The body takes ``batch`` (a ``LeasedBatch``) and, before it, ``context`` if it wants; typed resources and upstream
    assets as in any asset. What it returns is the asset's output. While it runs, and while the IO manager stores that
    output, heartbeats keep the leases. An exception fails what remains of the batch, with the error, and the queue
    retries it; ``Failure(allow_retries=False)`` dead-letters it; a cancelled run hands it back.

    ``per_item=True`` calls the body once an item, with ``lease``: a poison item fails alone, and the output is the list
    of what the others returned. ``drain=True`` goes on, batch after batch, until the queue is empty, or after
    ``max_batches`` or ``max_seconds``; the body publishes each batch by itself or through a ``FencedIOManager``, and
    the materialization links the last lease. ``by_partition=True`` leases only items whose ``partition_key`` is the
    run's partition; otherwise a run takes what is next in line, whichever its partition.
    ``on_empty`` says what to do when there is no work: ``"skip"`` (no output), ``"wait"`` (up to ``wait`` seconds, then
    skip) or ``"fail"``. Every other argument is ``@dg.asset``'s own.
    """
    leasing = Leasing(queue, batch_size, per_item, drain, by_partition, on_empty, wait, max_batches, max_seconds)
    _refuse_nonsense(leasing)
    if by_partition and arguments.get("partitions_def") is None:
        raise dg.DagsterInvalidDefinitionError("by_partition: needs the asset's partitions; pass partitions_def= too")

    def decorate(body: Body) -> dg.AssetsDefinition:
        own: dict[str, Any] = {"output_required": False}
        if "key" not in arguments:
            own["name"] = body.__name__
        made = dg.asset(**_all_arguments(body, leasing, arguments, own))(_compute(body, leasing, arguments))
        leased: dg.AssetsDefinition = using_queue(made, _use(leasing))
        return leased

    return decorate


def _with_arguments_of(
    pattern: Callable[P, Any],
) -> Callable[[Callable[[Leasing, dict[str, Any]], R]], Callable[P, R]]:
    """Let a function that takes settings and further arguments be called as ``pattern`` is."""
    shape = inspect.signature(pattern)

    def wrap(function: Callable[[Leasing, dict[str, Any]], R]) -> Callable[P, R]:
        @wraps(function)
        def call(*positional: P.args, **named: P.kwargs) -> R:
            bound = shape.bind(*positional, **named)
            bound.apply_defaults()
            given = dict(bound.arguments)
            rest = given.pop("arguments")
            return function(Leasing(**given), rest)

        call.__signature__ = shape  # type: ignore[attr-defined]
        return call

    return wrap


@_with_arguments_of(leased_asset)
def leased_op(leasing: Leasing, arguments: dict[str, Any]) -> Callable[[Body], dg.OpDefinition]:
    """The same as ``leased_asset`` for an op. Its one output is not required: with no work there is none."""
    _refuse_nonsense(leasing)

    def decorate(body: Body) -> dg.OpDefinition:
        own: dict[str, Any] = {"name": body.__name__, "out": dg.Out(Any, is_required=False)}
        made = dg.op(**_all_arguments(body, leasing, arguments, own))(_compute(body, leasing, arguments))
        return QueueOp(made, _use(leasing))

    return decorate


def _use(leasing: Leasing) -> UsesQueue:
    return UsesQueue(leasing.queue, leases=True, by_partition=leasing.by_partition)


def _all_arguments(body: Body, leasing: Leasing, given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's arguments and, where they say nothing, our own; the queue joins the resource keys if there are."""
    keys = given.get("required_resource_keys")
    joined = {"required_resource_keys": {*keys, leasing.queue}} if keys else {}
    return {"description": inspect.getdoc(body), **own, **given, **joined}


def _refuse_nonsense(leasing: Leasing) -> None:
    """Raise if the settings make no sense."""
    wrong = dg.DagsterInvalidDefinitionError
    if not isinstance(leasing.queue, str) or not leasing.queue.isidentifier():
        raise wrong(f"queue: {leasing.queue!r} must be the key of a LeaseQueueResource, such as queue='landing'")
    _refuse_unless_above_0("batch_size", leasing.batch_size, "a whole number", int)
    if leasing.on_empty not in ("skip", "wait", "fail"):
        raise wrong(f"on_empty: must be 'skip', 'wait' or 'fail' (got {leasing.on_empty!r})")
    _refuse_unless_above_0("wait", leasing.wait, "seconds", int, float)
    if not leasing.drain and (leasing.max_batches is not None or leasing.max_seconds is not None):
        raise wrong("max_batches, max_seconds: only mean something with drain=True")
    if leasing.max_batches is not None:
        _refuse_unless_above_0("max_batches", leasing.max_batches, "a whole number", int)
    if leasing.max_seconds is not None:
        _refuse_unless_above_0("max_seconds", leasing.max_seconds, "seconds", int, float)


def _refuse_unless_above_0(field: str, value: Any, what: str, *kinds: type) -> None:
    number: Any = value if isinstance(value, kinds) and not isinstance(value, bool) else 0
    if not number > 0:
        raise dg.DagsterInvalidDefinitionError(f"{field}: must be {what}, above 0 (got {value!r})")


def _compute(body: Body, leasing: Leasing, arguments: Mapping[str, Any]) -> Callable[..., Iterator[Any]]:
    """The function that Dagster runs: the body's parameters, less the one for its work, plus the queue's resource."""
    parameters = _parameters(body, leasing)
    required = arguments.get("required_resource_keys")
    takes_context = bool(parameters) and parameters[0].name == "context"

    def compute(context: Any, **given: Any) -> Iterator[Any]:
        resource = getattr(context.resources, leasing.queue) if required else given.pop(leasing.queue)
        arguments = ({"context": context} if takes_context else {}) | given
        yield from _run(context, resource, body, arguments, leasing)

    own = [parameter for parameter in parameters if parameter.name not in (*_FOR_BODY, "context")]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    queue = context.replace(name=leasing.queue, annotation=LeaseQueueResource)
    compute.__signature__ = inspect.Signature([context, *own, *([] if required else [queue])])  # type: ignore[attr-defined]
    compute.__name__ = body.__name__
    compute.__qualname__ = body.__qualname__
    compute.__doc__ = body.__doc__
    compute.__module__ = body.__module__
    return compute


def _parameters(body: Body, leasing: Leasing) -> list[inspect.Parameter]:
    wanted = "lease" if leasing.per_item else "batch"
    other = "batch" if leasing.per_item else "lease"
    parameters = list(inspect.signature(body, eval_str=True).parameters.values())
    names = [parameter.name for parameter in parameters]
    where = f"{body.__name__}({', '.join(names)})"
    if wanted not in names:
        hint = f" (found {other!r}; per_item={leasing.per_item})" if other in names else ""
        raise dg.DagsterInvalidDefinitionError(
            f"{where}: the body must take a parameter named {wanted!r}{hint}, "
            f"as in def {body.__name__}(context, {wanted})"
        )
    if leasing.queue in names:
        raise dg.DagsterInvalidDefinitionError(
            f"{where}: the parameter {leasing.queue!r} has the queue's name; the queue is at {wanted}"
            f"{'' if leasing.per_item else '.queue'}, so leave it out or rename it"
        )
    if "context" in names[1:]:
        raise dg.DagsterInvalidDefinitionError(f"{where}: context must be the first parameter")
    return parameters


def _run(
    context: Any, resource: LeaseQueueResource, body: Body, arguments: dict[str, Any], leasing: Leasing
) -> Iterator[Any]:
    """Lease, work, publish; with ``drain``, until there is no more to do."""
    if not leasing.drain:
        batch = _lease(context, resource, leasing, first=True)
        if batch is not None:
            yield from _one_batch(context, resource, batch, body, arguments, leasing)
        return
    yield from _drain(context, resource, body, arguments, leasing)


def _lease(context: Any, resource: LeaseQueueResource, leasing: Leasing, first: bool) -> LeasedBatch | None:
    queue = resource.get_queue()
    wait = leasing.wait if first and leasing.on_empty == "wait" else None
    partition = str(context.partition_key) if leasing.by_partition else None
    leases = queue.lease(peer_id(context), leasing.batch_size, wait=wait, partition_key=partition)
    if leases:
        resource.keep_track([lease.token for lease in leases])
        return LeasedBatch(queue, leases, context.log.info)
    if first and leasing.on_empty == "fail":
        raise dg.Failure(f"{_where(queue, partition)} is empty", allow_retries=False)
    if first:
        context.log.info(f"{_where(queue, partition)} is empty: nothing to do")
    return None


def _where(queue: LeaseQueue, partition: str | None) -> str:
    return f"the queue {queue.namespace!r}" if partition is None else f"partition {partition!r} of {queue.namespace!r}"


def peer_id(context: Any) -> str:
    """Who leases: the run and the step that this is."""
    return owner_of(context.run.run_id, context.get_step_execution_context().step.key)


def _one_batch(
    context: Any,
    resource: LeaseQueueResource,
    batch: LeasedBatch,
    body: Body,
    arguments: dict[str, Any],
    leasing: Leasing,
) -> Iterator[Any]:
    with batch, _accountable(batch, resource), spark_jobs(batch, _in_reach(context, arguments)):
        with stopped_by_signals(batch):
            value = _work(batch, body, arguments, leasing)
        batch.check()
        yield _output(value, batch)
        # Dagster resumes this generator only once the output is stored
        if not batch.completed:
            batch.complete()
    context.log.info(f"completed {len(batch)} items of {batch.queue.namespace!r} under lease {batch.id}")


def _in_reach(context: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """The body's arguments, and the resources that it gets through its context."""
    return [*arguments.values(), *context.resources._asdict().values()]


def _drain(
    context: Any, resource: LeaseQueueResource, body: Body, arguments: dict[str, Any], leasing: Leasing
) -> Iterator[Any]:
    started = time.monotonic()
    batches = items = attempt = 0
    latest: dict[str, Any] = {}
    while (leasing.max_batches is None or batches < leasing.max_batches) and (
        leasing.max_seconds is None or time.monotonic() - started < leasing.max_seconds
    ):
        batch = _lease(context, resource, leasing, first=batches == 0)
        if batch is None:
            break
        with batch, _accountable(batch, resource), spark_jobs(batch, _in_reach(context, arguments)):
            with stopped_by_signals(batch):
                value = _work(batch, body, arguments, leasing)
                batch.check()
                _publish(context, batch, value)
            if not batch.completed:
                batch.complete()
        batches += 1
        items += len(batch)
        latest = batch.metadata()
        attempt = max(attempt, latest["omnirelay/attempt"])
        context.log.info(f"{batches} batches, {items} items so far")
    if batches:
        whole = {"omnirelay/batches": batches, "omnirelay/items": items, "omnirelay/attempt": attempt}
        yield _result(context, {**latest, **whole})


def _result(context: Any, metadata: dict[str, Any]) -> Any:
    if context.has_assets_def:
        return dg.MaterializeResult(metadata=metadata)
    return dg.Output(metadata, metadata=metadata)


def _publish(context: Any, batch: LeasedBatch, value: Any) -> None:
    """Store the output of one of many batches, which Dagster itself would take only one of."""
    value = value.value if isinstance(value, dg.Output) else value
    if value is None or publish_batch(context, batch, value):
        return
    raise dg.DagsterInvariantViolationError(
        "with drain=True the body publishes by itself and returns None, or the asset uses a FencedIOManager"
    )


class _accountable:
    """Whatever ends the block, the batch's leases are accounted for: completed, failed, released or left to expire."""

    def __init__(self, batch: LeasedBatch, resource: LeaseQueueResource) -> None:
        self._batch = batch
        self._resource = resource

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, dg.Failure) and error.allow_retries is False:
            give_up(self._batch, error, requeue=False)
        elif isinstance(error, dg.RetryRequested):
            give_up(self._batch, error.__cause__ or error, delay=error.seconds_to_wait or 0)
        elif error is not None:
            give_up(self._batch, error)
        self._resource.lose_track([lease.token for lease in self._batch.leases])


def _work(batch: LeasedBatch, body: Body, arguments: dict[str, Any], leasing: Leasing) -> Any:
    if not leasing.per_item:
        return body(**arguments, batch=batch)
    values = []
    for done, lease in enumerate(batch, start=1):
        try:
            values.append(body(**arguments, lease=lease))
        except dg.RetryRequested:
            raise
        except Exception as error:
            _fail_one(batch, lease, error)
        batch.progress(done)
    if batch.leases and not batch.remaining:
        raise dg.Failure(f"all {len(batch)} items failed; their errors are in the queue's history")
    if leasing.drain and all(value is None for value in values):
        return None  # the body publishes by itself, item by item
    return values


def _fail_one(batch: LeasedBatch, lease: Lease, error: Exception) -> None:
    final = isinstance(error, dg.Failure) and error.allow_retries is False
    batch.fail(lease, error, requeue=not final)


def _output(value: Any, batch: LeasedBatch) -> Any:
    """The body's value as Dagster wants it, with what ties it to its leases."""
    if isinstance(value, dg.MaterializeResult):
        return value._replace(metadata={**(value.metadata or {}), **batch.metadata()})
    if isinstance(value, dg.Output):
        return value.with_metadata({**value.metadata, **batch.metadata()})
    return dg.Output(value, metadata=batch.metadata())
