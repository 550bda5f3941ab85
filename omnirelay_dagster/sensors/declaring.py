"""What all sensors have in common when they are declared: checked arguments, and the queue as a typed resource.

Every mistake is refused while the definitions load, by a message that names the argument and says what it must be.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import dagster as dg

from lease_core import LeaseQueue
from omnirelay_dagster.requirements import RESOURCE
from omnirelay_dagster.resource import LeaseQueueResource

Settings = TypeVar("Settings")

_NAME = re.compile(r"[A-Za-z0-9_]+")


def wrong(argument: str, problem: str) -> dg.DagsterInvalidDefinitionError:
    """The error for an argument that cannot be accepted."""
    return dg.DagsterInvalidDefinitionError(f"{argument}: {problem}")


def check_queue(queue: Any) -> str:
    if not isinstance(queue, str) or not queue.isidentifier() or queue == "context":
        raise wrong("queue", f"must be the key of a LeaseQueueResource, such as queue='landing' (got {queue!r})")
    return queue


def check_name(name: Any, otherwise: str) -> str:
    """The sensor's name, or the one it has unless told otherwise."""
    if name is None:
        return otherwise
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong("name", f"must be letters, digits and underscores only (got {name!r})")
    return name


def check_whole(argument: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(argument, f"must be a whole number, {least} or more (got {value!r})")
    return value


def check_seconds(argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise wrong(argument, f"must be a number of seconds above 0 (got {value!r})")
    return float(value)


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise wrong(argument, f"must be one of {', '.join(map(repr, choices))} (got {value!r})")


def check_timing(minimum_interval_seconds: Any, default_status: Any) -> None:
    check_whole("minimum_interval_seconds", minimum_interval_seconds, 1)
    if not isinstance(default_status, dg.DefaultSensorStatus):
        raise wrong("default_status", f"must be a dg.DefaultSensorStatus (got {default_status!r})")


def with_queue(queue: str, tick: Callable[[Any, LeaseQueue], Any]) -> Callable[..., Any]:
    """The function that Dagster evaluates: it takes the context and, under its key, the queue's resource."""

    def evaluate(context: Any, **resources: LeaseQueueResource) -> Any:
        return tick(context, resources[queue].get_queue())

    given = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    typed = inspect.Parameter(queue, inspect.Parameter.KEYWORD_ONLY, annotation=LeaseQueueResource)
    evaluate.__signature__ = inspect.Signature([given, typed])  # type: ignore[attr-defined]
    evaluate.__annotations__ = {queue: LeaseQueueResource}
    return evaluate


def queue_sensor(
    queue: str,
    tick: Callable[[dg.SensorEvaluationContext, LeaseQueue, Settings], dg.SensorResult],
    settings: Settings,
    *,
    name: str,
    minimum_interval_seconds: int,
    default_status: dg.DefaultSensorStatus,
    description: str,
    **target: Any,
) -> dg.SensorDefinition:
    """The sensor that evaluates ``tick`` with the queue and its settings, and says which queue it is about."""
    check_timing(minimum_interval_seconds, default_status)
    return dg.SensorDefinition(
        name=name,
        evaluation_fn=with_queue(queue, lambda context, lease_queue: tick(context, lease_queue, settings)),
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description,
        metadata={RESOURCE: queue},
        **target,
    )


def location_of(context: dg.SensorEvaluationContext) -> str | None:
    """The code location that the sensor lives in, unless it is evaluated outside of any, as tests do."""
    origin = context.code_location_origin
    return None if origin is None else origin.location_name
