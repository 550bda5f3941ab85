"""Options of the configuration as the types that a sink's arguments have: the environment knows nothing but text.

A flag that came as the text ``false`` would count as set, and with a flag like ``insecure`` that is no small matter. So
each option is read by the annotation of the argument that it is for, of our sinks and of anybody's. What does not fit
is refused before the sink is made, rather than retried for ever once it fails by it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from lease_core.errors import InvalidInput

_UNKNOWN = inspect.Parameter.empty
_WANTED = {  # by the first word of pydantic's name for the error
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "path": "a path",
    "list": "a list (in the environment as JSON)",
    "mapping": "a table (in the environment as JSON)",
    "dict": "a table (in the environment as JSON)",
}


def fit_options(factory: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as ``factory`` wants them; those of which it does not say what it wants are left as they are.

    Raises ``InvalidInput`` with the option's name, and shows no value: it may be a secret.
    """
    hints = _hints(factory)
    return {name: _fit(name, hints.get(name, hints.get("**", _UNKNOWN)), each) for name, each in options.items()}


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """The type of each argument, as far as it is told; ``**`` has that of all that have no name."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError, NameError):  # it is not written in Python, or will not say
        return {}
    any_other = inspect.Parameter.VAR_KEYWORD
    return {"**" if each.kind is any_other else each.name: _hint(factory, each.annotation) for each in parameters}


def _hint(factory: Callable[..., Any], annotation: Any) -> Any:
    """One annotation, by itself: another one that only a type checker can resolve must not leave this one unread."""
    function: Any = inspect.unwrap(factory.__init__ if isinstance(factory, type) else factory)  # type: ignore[misc]
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)["it"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return _UNKNOWN


def _fit(name: str, hint: Any, value: Any) -> Any:
    if hint is _UNKNOWN:
        return value
    if isinstance(value, str) and _may_be_flag_or_text(hint):
        return _flag_or_text(value)
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        fitted = adapter.validate_python(value)
    except ValidationError as error:
        fitted = _from_json(adapter, value, _refusal(name, error))
    except (PydanticUserError, TypeError):  # a type of which it cannot be told what fits
        return value
    return value if isinstance(fitted, Iterator) else fitted  # what is checked as it is read can be read only once


def _may_be_flag_or_text(hint: Any) -> bool:
    kinds = typing.get_args(hint)
    return typing.get_origin(hint) in (types.UnionType, typing.Union) and bool in kinds and str in kinds


def _flag_or_text(value: str) -> bool | str:
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return value


def _from_json(adapter: TypeAdapter[Any], value: Any, wrong: InvalidInput) -> Any:
    """What has parts of its own, and came as one text."""
    if not isinstance(value, str):
        raise wrong
    try:
        return adapter.validate_json(value)
    except ValidationError:
        raise wrong from None


def _refusal(name: str, error: ValidationError) -> InvalidInput:
    """Which option, or which part of it, and what it must be."""
    found = error.errors(include_input=False, include_url=False, include_context=False)
    place = [name, *found[0]["loc"]] if len(found) == 1 else [name]  # of several, one for each type that it might be
    wanted = dict.fromkeys(
        _WANTED.get(each["type"].partition("_")[0]) or each["msg"].removeprefix("Input should be ") for each in found
    )
    return InvalidInput(".".join(map(str, place)), f"must be {' or '.join(wanted)}")
