"""Calls code from outside: its signature is the section of the recipe that has its arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ValidationError, create_model

from bigsgan import plugins
from bigsgan.config.messages import choose, explain
from bigsgan.config.sections import Section
from bigsgan.errors import UserError

_PLAIN = (bool, int, float, str, list, tuple, dict, NoneType, Any)
"""Types of arguments that a recipe's values are checked against; others are left to the function."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def build(
    field: str, name: str, kind: str, given: Mapping[str, Any], offered: Mapping[str, Any], keys: str = ""
) -> Any:
    """Call what a name stands for, with the arguments ``given``, and with those ``offered`` that its signature names.

    Args:
        field: The recipe's key that has the name.
        name: See ``plugins.load``.
        kind: See ``plugins.load``.
        given: What the recipe gives.
        offered: What follows from the recipe's other keys.
        keys: The recipe's key that has the arguments; by default ``arguments`` beside ``field``.

    Raises:
        UserError: See ``plugins.load`` and ``checked_arguments``; or the call fails.
    """
    function = plugins.load(field, name, kind)
    keys = keys or f"{field.rpartition('.')[0]}.arguments".lstrip(".")
    arguments = checked_arguments(keys, name, function, given, offered)
    return plugins.called(field, name, lambda: function(**arguments))


def takes(function: Any) -> list[str]:
    """Return the names of the arguments that can be given by name; none if Python does not know them."""
    parameters = _parameters(function) or {}
    return [n for n, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def checked_arguments(
    keys: str, name: str, function: Any, given: Mapping[str, Any], offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a function is called with.

    Raises:
        UserError: An argument is unknown, missing, follows from another key, or is not of the annotated type.
    """
    parameters, named, types = _parameters(function), takes(function), _types(function)
    if parameters is None:
        return dict(given)
    own = [key for key in named if key not in offered]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    found = {key: value for key, value in offered.items() if key in named}
    for key, value in given.items():
        if key in found:
            problem, detail = "must be left out", "it follows from the recipe's other keys"
            raise UserError(f"{keys}.{key}", value, problem, "remove it", detail)
        if key not in own and not takes_any:
            close = choose(key, ", ".join(own)) if own else ""
            every = f"the arguments of {name} are {', '.join(own)}" if own else f"{name} takes none"
            remedy = close if close.startswith("did you") else every
            raise UserError(f"{keys}.{key}", None, "unknown key", remedy)
        found[key] = _checked(f"{keys}.{key}", value, types.get(key, Any))
    for key, each in parameters.items():
        if key in found or each.default is not each.empty:
            continue
        if key in named:
            raise UserError(f"{keys}.{key}", None, "must be given", "add it to the recipe", f"{name} needs it")
        if each.kind is each.POSITIONAL_ONLY:
            remedy = "let it be given by its name"
            raise UserError(f"{keys}.{key}", None, f"cannot be given: {name} takes it by its place alone", remedy)
    return found


def typed(function: _Function) -> _Function:
    """Let a function behind the Python interface refuse arguments that are not of the annotated types."""

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        types, signature = get_type_hints(function), inspect.signature(function)
        for name, value in signature.bind(*given, **named).arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            for each in value if several else (value,):
                if not _is_of(each, types.get(name, object)):  # a class method's class has no type
                    problem = f"must be of type {function.__annotations__[name]}"
                    raise UserError(name, each, problem, "see the docstring", f"it is {type(each).__name__}")
        return function(*given, **named)

    return call  # type: ignore[return-value]


def _is_of(value: Any, annotation: Any) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_is_of(value, part) for part in parts)
    if annotation is int:  # numpy's too
        return isinstance(value, Integral) and not isinstance(value, bool)
    if isinstance(annotation, type) and isinstance(value, annotation):
        return True
    value = value.tolist() if hasattr(value, "tolist") else value  # an array, a tensor
    if not isinstance(value, origin or annotation):
        return False
    return not isinstance(value, Iterable) or all(_is_of(each, part) for part in parts[:1] for each in value)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of what is called, by name; None if Python does not know them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _types(function: Any) -> dict[str, Any]:
    """Return the annotations of a function's arguments, or of a class's constructor; none if they cannot be read."""
    try:
        return get_type_hints(vars(function)["__init__"] if isinstance(function, type) else function)
    except Exception:  # annotations are any code
        return {}


def _checked(field: str, value: Any, annotation: Any) -> Any:
    """Check a value against an annotation as a recipe's own values are checked; lists may stand for tuples."""
    if not _is_plain(annotation):
        return value
    model = create_model("Argument", __base__=Section, value=(annotation, ...))
    for each in (value, tuple(value)) if isinstance(value, list) else (value,):
        try:
            return model.model_validate({"value": each}).value  # type: ignore[attr-defined]
        except ValidationError as error:
            told = explain(error, model)
    raise UserError(field, told.value, told.problem, told.remedy, told.detail)


def _is_plain(annotation: Any) -> bool:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return True
    if origin in (Union, UnionType, list, tuple, dict):
        return all(part is ... or _is_plain(part) for part in parts)
    return annotation in _PLAIN
