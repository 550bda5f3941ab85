"""``@leased_asset`` and ``@leased_op``: compute functions that work on leased batches."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import dagster as dg

from lease_core import Lease
from omnirelay_dagster.batch import LeasedBatch, give_up
from omnirelay_dagster.io_manager import publish_batch
from omnirelay_dagster.resource import LeaseQueueResource

Body = Callable[..., Any]
OnEmpty = Literal["skip", "wait", "fail"]

_FOR_BODY = ("batch", "lease")


class Leasing(NamedTuple):
    """How a body gets its work."""

    queue: str
    batch_size: int
    per_item: bool
    drain: bool
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
    on_empty: OnEmpty = "skip",
    wait: float = 60.0,
    max_batches: int | None = None,
    max_seconds: float | None = None,
    **asset_arguments: Any,
) -> Callable[[Body], dg.AssetsDefinition]:
    """An asset that leases a batch from the resource ``queue`` and completes it once its output is stored.

    The body takes ``batch`` (a ``LeasedBatch``) and, before it, ``context`` if it wants; typed resources and upstream
    assets as in any asset. What it returns is the asset's output. While it runs, and while the IO manager stores that
    output, heartbeats keep the leases. An exception fails what remains of the batch, with the error, and the queue
    retries it; ``Failure(allow_retries=False)`` dead-letters it; a cancelled run hands it back.

    ``per_item=True`` calls the body once an item, with ``lease``: a poison item fails alone, and the output is the list
    of what the others returned. ``drain=True`` goes on, batch after batch, until the queue is empty, or after
    ``max_batches`` or ``max_seconds``; the body publishes each batch by itself or through a ``FencedIOManager``.
    ``on_empty`` says what to do when there is no work: ``"skip"`` (no output), ``"wait"`` (up to ``wait`` seconds, then
    skip) or ``"fail"``. Every other argument is ``@dg.asset``'s own.
    """
    leasing = _leasing(queue, batch_size, per_item, drain, on_empty, wait, max_batches, max_seconds)

    def decorate(body: Body) -> dg.AssetsDefinition:
        compute = _compute(body, leasing, asset_arguments.get("required_resource_keys"))
        arguments: dict[str, Any] = {
            "name": body.__name__,
            "description": inspect.getdoc(body),
            "output_required": False,
        }
        if "key" in asset_arguments:
            del arguments["name"]
        if asset_arguments.get("required_resource_keys"):
            arguments["required_resource_keys"] = {*asset_arguments["required_resource_keys"], queue}
        made: dg.AssetsDefinition = dg.asset(**_rest(asset_arguments, arguments), **arguments)(compute)
        return made

    return decorate


def leased_op(
    *,
    queue: str,
    batch_size: int = 100,
    per_item: bool = False,
    drain: bool = False,
    on_empty: OnEmpty = "skip",
    wait: float = 60.0,
    max_batches: int | None = None,
    max_seconds: float | None = None,
    **op_arguments: Any,
) -> Callable[[Body], dg.OpDefinition]:
    """The same as ``leased_asset`` for an op. Its one output is not required: with no work there is none."""
    leasing = _leasing(queue, batch_size, per_item, drain, on_empty, wait, max_batches, max_seconds)

    def decorate(body: Body) -> dg.OpDefinition:
        compute = _compute(body, leasing, op_arguments.get("required_resource_keys"))
        arguments: dict[str, Any] = {"name": body.__name__, "description": inspect.getdoc(body)}
        if "out" not in op_arguments:
            arguments["out"] = dg.Out(Any, is_required=False)
        if op_arguments.get("required_resource_keys"):
            arguments["required_resource_keys"] = {*op_arguments["required_resource_keys"], queue}
        made: dg.OpDefinition = dg.op(**_rest(op_arguments, arguments), **arguments)(compute)
        return made

    return decorate


def _rest(given: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What the caller gave beyond our own arguments; what both have is the caller's, but for the resource keys."""
    for name in set(own) & set(given) - {"required_resource_keys"}:
        own[name] = given[name]
    return {name: value for name, value in given.items() if name not in own and name != "required_resource_keys"}


def _leasing(
    queue: str,
    batch_size: int,
    per_item: bool,
    drain: bool,
    on_empty: OnEmpty,
    wait: float,
    max_batches: int | None,
    max_seconds: float | None,
) -> Leasing:
    """The settings, if they make sense."""
    wrong = dg.DagsterInvalidDefinitionError
    if not isinstance(queue, str) or not queue.isidentifier():
        raise wrong(f"queue: {queue!r} must be the key of a LeaseQueueResource, such as queue='landing'")
    if not isinstance(batch_size, int) or batch_size < 1:
        raise wrong(f"batch_size: must be a whole number above 0 (got {batch_size!r})")
    if on_empty not in ("skip", "wait", "fail"):
        raise wrong(f"on_empty: must be 'skip', 'wait' or 'fail' (got {on_empty!r})")
    if wait <= 0:
        raise wrong(f"wait: must be above 0 seconds (got {wait!r})")
    if not drain and (max_batches is not None or max_seconds is not None):
        raise wrong("max_batches, max_seconds: only mean something with drain=True")
    return Leasing(queue, batch_size, per_item, drain, on_empty, wait, max_batches, max_seconds)


def _compute(body: Body, leasing: Leasing, required: Any) -> Callable[..., Iterator[Any]]:
    """The function that Dagster runs: the body's parameters, less the one for its work, plus the queue's resource."""
    parameters = _parameters(body, leasing)
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
    leases = queue.lease(peer_id(context), leasing.batch_size, wait=wait)
    if leases:
        resource.keep_track([lease.token for lease in leases])
        return LeasedBatch(queue, leases, context.log.info)
    if first and leasing.on_empty == "fail":
        raise dg.Failure(f"the queue {queue.namespace!r} is empty", allow_retries=False)
    if first:
        context.log.info(f"the queue {queue.namespace!r} is empty: nothing to do")
    return None


def peer_id(context: Any) -> str:
    """Who leases: the run and step, so that a dead run's leases can be found and handed back."""
    return f"dagster/{context.run.run_id}/{context.get_step_execution_context().step.key}"


def _one_batch(
    context: Any,
    resource: LeaseQueueResource,
    batch: LeasedBatch,
    body: Body,
    arguments: dict[str, Any],
    leasing: Leasing,
) -> Iterator[Any]:
    with batch, _accountable(batch, resource):
        value = _work(batch, body, arguments, leasing)
        batch.check()
        yield _output(value, batch)
        # Dagster resumes this generator only once the output is stored
        if not batch.completed:
            batch.complete()
    context.log.info(f"completed {len(batch)} items of {batch.queue.namespace!r} under lease {batch.id}")


def _drain(
    context: Any, resource: LeaseQueueResource, body: Body, arguments: dict[str, Any], leasing: Leasing
) -> Iterator[Any]:
    started = time.monotonic()
    batches = items = 0
    while (leasing.max_batches is None or batches < leasing.max_batches) and (
        leasing.max_seconds is None or time.monotonic() - started < leasing.max_seconds
    ):
        batch = _lease(context, resource, leasing, first=batches == 0)
        if batch is None:
            break
        with batch, _accountable(batch, resource):
            value = _work(batch, body, arguments, leasing)
            batch.check()
            _publish(context, batch, value)
            if not batch.completed:
                batch.complete()
        batches += 1
        items += len(batch)
        context.log.info(f"{batches} batches, {items} items so far")
    if batches:
        metadata = {"omnirelay/queue": resource.get_queue().namespace, "omnirelay/batches": batches}
        yield _result(context, {**metadata, "omnirelay/items": items})


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
