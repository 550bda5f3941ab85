"""What work on a queue needs of the resources around it, refused while definitions load if it is not there.

Dagster asks every op for its requirements before a code location loads, and checks them against the resources. The
requirement of our ops looks closer than whether there is something under the key: it must be a queue, the fenced IO
manager must be of the same queue, and no asset of the same job may store its output with a fenced IO manager without
leasing anything. What Dagster has no hook for (sensors alone, plain ops, two assets with one key) is left to
``check_definitions``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import update_wrapper
from inspect import isgeneratorfunction, signature
from typing import Any, NamedTuple

import dagster as dg
from dagster._core.definitions.resource_requirement import ResourceKeyRequirement, ResourceRequirement
from dagster._core.execution.build_resources import wrap_resource_for_execution
from dagster._utils.warnings import disable_dagster_warnings

from omnirelay_dagster.io_manager import FencedIOManager
from omnirelay_dagster.resource import LeaseQueueResource

Resources = Mapping[str, dg.ResourceDefinition]

RESOURCE = "omnirelay/resource"
"""The metadata key under which a queue's asset and its sensors name the resource they are about."""

_HARDCODED = dg.ResourceDefinition.hardcoded_resource(None).resource_fn.__qualname__


class UsesQueue(NamedTuple):
    """How an op uses a queue: which, whether it leases from it, and whether only items of the run's partition."""

    queue: str
    leases: bool = False
    by_partition: bool = False


class QueueOp(dg.OpDefinition):
    """An op that uses a queue, and says so to whoever loads it."""

    def __init__(self, op: dg.OpDefinition, uses: UsesQueue) -> None:
        super().__init__(
            compute_fn=op.compute_fn,
            name=op.name,
            ins={each.name: dg.In.from_definition(each) for each in op.input_defs},
            outs={each.name: dg.Out.from_definition(each) for each in op.output_defs},
            description=op.description,
            config_schema=op.config_schema,
            required_resource_keys=set(op.required_resource_keys),
            tags=op.tags,
            retry_policy=op.retry_policy,
            code_version=op._version,
            pool=op.pool,
        )
        self.uses = uses
        update_wrapper(self, _function(op))

    def with_replaced_properties(self, *positional: Any, **named: Any) -> QueueOp:
        return QueueOp(super().with_replaced_properties(*positional, **named), self.uses)

    def get_resource_requirements(self, handle: Any, asset_layer: Any) -> Iterator[ResourceRequirement]:
        others = None if asset_layer is None else asset_layer.asset_graph.assets_defs
        yield QueueRequirement(self, others)
        for requirement in super().get_resource_requirements(handle, asset_layer):
            if not isinstance(requirement, ResourceKeyRequirement) or requirement.key != self.uses.queue:
                yield requirement


class QueueRequirement(ResourceKeyRequirement):
    """The queue that an op uses. ``others`` are the assets of the same job, if the job is one of assets."""

    def __init__(self, op: QueueOp, others: Iterable[dg.AssetsDefinition] | None) -> None:
        self._op = op
        self._others = others or ()

    @property
    def key(self) -> str:
        return self._op.uses.queue

    def describe_requirement(self) -> str:
        return f"resource with key {self.key!r} required by op {self._op.name!r}"

    def is_satisfied(self, resource_defs: Resources) -> bool:
        return self.key in resource_defs and may_be_queue(resource_defs[self.key])

    def ensure_satisfied(self, resource_defs: Resources) -> None:
        ensure_queue(self.key, resource_defs, f"op {self._op.name!r}")
        if self._op.uses.leases:
            _ensure_same_queue(self._op, resource_defs)
        ensure_leased(self._others, resource_defs)


def using_queue(assets: Any, uses: UsesQueue) -> Any:
    """The same assets or asset checks, made by a ``QueueOp``."""
    with disable_dagster_warnings():
        return type(assets)(**{**assets.get_attributes_dict(), "node_def": QueueOp(assets.op, uses)})


def use_of(assets: Any) -> UsesQueue | None:
    """How an asset uses a queue, if it does."""
    op = assets.node_def if isinstance(assets, dg.AssetsDefinition) and assets.is_executable else None
    return op.uses if isinstance(op, QueueOp) else None


def check_definitions(defs: dg.Definitions) -> dg.Definitions:
    """Give back ``defs`` if all that uses a queue can work, and raise otherwise. For the whole of a code location.

    Most mistakes are refused without it, when Dagster loads the definitions. This also finds those that Dagster would
    only meet at run time, or names without a remedy: a sensor whose queue is not among the resources, a plain op
    that stores its output with a ``FencedIOManager``, another asset that has the key of a queue's asset.
    """
    _ensure_own_keys(defs)
    repository = defs.get_repository_def()
    dg.Definitions.validate_loadable(defs)
    resources = repository.get_top_level_resources()
    for sensor in repository.sensor_defs:
        if (queue := _plain(sensor.metadata.get(RESOURCE))) is not None:
            ensure_queue(queue, resources, f"sensor {sensor.name!r}")
    ensure_leased(repository.asset_graph.assets_defs, resources)
    for job in repository.get_all_jobs():
        if not list(job.asset_layer.asset_graph.assets_defs):
            _ensure_leased_ops(job)
    return defs


# The queue under its key


def ensure_queue(key: str, resources: Resources, who: str) -> None:
    """Raise unless there is a queue under ``key``, or something of which that cannot be told."""
    need = f"resource with key {key!r} required by {who}"
    if key not in resources:
        queues = [name for name, definition in resources.items() if _kind(definition) is LeaseQueueResource]
        there = f", or name one that is there: {', '.join(map(repr, sorted(queues)))}" if queues else ""
        raise dg.DagsterInvalidDefinitionError(
            f"{need} was not provided: there is no such queue. Add it to the definitions, "
            f"resources={{{key!r}: LeaseQueueResource(url=...)}}{there}"
        )
    if not may_be_queue(resources[key]):
        kind = _kind(resources[key])
        raise dg.DagsterInvalidDefinitionError(
            f"{need} must be a queue, and is a {getattr(kind, '__name__', kind)}. Put a LeaseQueueResource there, "
            f"resources={{{key!r}: LeaseQueueResource(url=...)}}, and the other one under another key"
        )


def may_be_queue(definition: dg.ResourceDefinition) -> bool:
    """Whether a resource is a queue. One that a function makes may be; what it gives is known at run time only."""
    kind = _kind(definition)
    return kind is None or hasattr(kind, "get_queue")


def _kind(definition: dg.ResourceDefinition) -> type | None:
    """The class of what a resource will be; None if only running its function would tell."""
    kind = getattr(definition, "configurable_resource_cls", None)
    if kind is None and definition.resource_fn.__qualname__ == _HARDCODED:
        kind = type(definition.resource_fn(None))  # type: ignore[call-arg, arg-type]
    return kind


# The fenced IO manager


def _is_fenced(definition: dg.ResourceDefinition | None) -> bool:
    kind = None if definition is None else _kind(definition)
    return isinstance(kind, type) and issubclass(kind, FencedIOManager)


def _ensure_same_queue(op: QueueOp, resources: Resources) -> None:
    """Raise if an output goes to a fenced IO manager that is certainly of another queue."""
    mine = _namespace(resources[op.uses.queue])
    for output in op.output_defs:
        manager = resources.get(output.io_manager_key)
        if not _is_fenced(manager):
            continue
        nested = getattr(manager, "nested_resources", {}).get("queue")
        its = None if nested is None else _namespace(wrap_resource_for_execution(nested))
        if mine is not None and its is not None and mine != its:
            raise dg.DagsterInvalidDefinitionError(
                f"op {op.name!r} leases from the namespace {mine!r}, but its IO manager {output.io_manager_key!r} "
                f"publishes to {its!r}. Give both the same LeaseQueueResource, or the op an IO manager of its own "
                "(io_manager_key=...)"
            )


def _namespace(definition: dg.ResourceDefinition) -> str | None:
    """The namespace of a queue, if it is written in the code and not left to the environment or the launchpad."""
    kind = _kind(definition)
    if not (isinstance(kind, type) and issubclass(kind, LeaseQueueResource)):
        return None
    schema = definition.config_schema
    given = json.loads(schema.default_value_as_json_str) if schema.default_provided else {}
    found = given.get("namespace", LeaseQueueResource.model_fields["namespace"].default) if "url" in given else None
    return found if isinstance(found, str) else None


def ensure_leased(assets: Iterable[dg.AssetsDefinition], resources: Resources) -> None:
    """Raise if an asset that leases nothing would store its output with a fenced IO manager."""
    if not any(_is_fenced(definition) for definition in resources.values()):
        return
    for each in assets:
        if not each.is_executable or not each.is_materializable:
            continue
        own = {**resources, **each.resource_defs}
        for name, key in each.node_keys_by_output_name.items():
            op = each.node_def.resolve_output_to_origin_op_def(name)
            manager = each.get_io_manager_key_for_asset_key(key)
            if _stores_without_lease(op) and _output_kind(each, name) and _is_fenced(own.get(manager)):
                raise _not_leased(f"asset {key.to_user_string()!r}", manager)


def _output_kind(assets: dg.AssetsDefinition, name: str) -> bool:
    """Whether an output has a value at all."""
    return not assets.node_def.output_def_named(name).dagster_type.is_nothing


def _ensure_leased_ops(job: dg.JobDefinition) -> None:
    for op in job.all_node_defs:
        if isinstance(op, dg.OpDefinition) and _stores_without_lease(op):
            for output in op.output_defs:
                if not output.dagster_type.is_nothing and _is_fenced(job.resource_defs.get(output.io_manager_key)):
                    raise _not_leased(f"op {op.name!r} of job {job.name!r}", output.io_manager_key)


def _stores_without_lease(op: dg.OpDefinition) -> bool:
    """Whether an op leases nothing, and returns values: a function that may give a MaterializeResult need not."""
    if isinstance(op, QueueOp) and op.uses.leases:
        return False
    function = _function(op)
    if isgeneratorfunction(function) or "MaterializeResult" in getattr(
        getattr(function, "__code__", None), "co_names", ()
    ):
        return False
    return "MaterializeResult" not in str(signature(function).return_annotation)


def _not_leased(who: str, manager: str) -> Exception:
    return dg.DagsterInvalidDefinitionError(
        f"{who} stores its output with the fenced IO manager {manager!r}, which publishes the outputs of leases, and "
        "this leases nothing. Declare it with @leased_asset(queue=...) or @leased_op(queue=...), or give it another IO "
        "manager (io_manager_key=...); if it stores its output by itself, annotate it -> None or "
        "-> dg.MaterializeResult"
    )


# The rest


def _ensure_own_keys(defs: dg.Definitions) -> None:
    """Raise if a queue's asset has the key of another asset."""
    owners: dict[dg.AssetKey, str | None] = {}
    for asset in defs.assets or ():
        for spec in [asset] if isinstance(asset, dg.AssetSpec) else getattr(asset, "specs", ()):
            queue = _plain(spec.metadata.get(RESOURCE))
            other = owners.setdefault(spec.key, queue)
            if other != queue and (queue or other):
                raise dg.DagsterInvalidDefinitionError(
                    f"asset_key: {spec.key.to_user_string()!r} is the key of the asset that stands for the queue "
                    f"{queue or other!r}, and of another asset. Give the queue's another one, "
                    f"lease_queue_definitions(queue={queue or other!r}, asset_key=...), or rename the other asset"
                )


def _function(op: dg.OpDefinition) -> Any:
    return getattr(op.compute_fn, "decorated_fn", op.compute_fn)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value
