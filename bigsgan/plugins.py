"""Code from outside the package that a recipe names, as ``package.module:attribute`` or by an entry point.

Only names that the user has given are imported: in a recipe, an override, an option or a call. A checkpoint, an export
or a file of a hub names code too, but its author may be anybody.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from bigsgan.errors import UserError, reason

KINDS = ("families", "terms", "data", "metrics", "callbacks")
"""What entry points of the groups ``bigsgan.KIND`` name."""

FORM = "package.module:attribute"

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_given: set[str] = set()
"""The names that the user of this process has given."""


class Plugin(NamedTuple):
    """An entry point that an installed package offers."""

    name: str  # as recipes write it
    kind: str  # one of ``KINDS``
    target: str  # ``package.module:attribute``
    package: str
    version: str


def is_name(text: object) -> bool:
    """Return whether a text has the form ``package.module:attribute``."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def installed() -> list[Plugin]:
    """Return the entry points of all installed packages, by kind and name; nothing is imported."""
    return [_described(kind, found) for kind in KINDS for found in sorted(_entry_points(kind), key=lambda e: e.name)]


def names(kind: str) -> list[str]:
    """Return the names of a kind that entry points add."""
    return sorted(found.name for found in _entry_points(kind))


def give(tree: object) -> None:
    """Let the names in nested dictionaries and lists, which the user gave, be imported."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for each in tree:
            give(each)
    elif isinstance(tree, str):
        _given.add(tree)


def load(field: str, name: str, kind: str = "") -> Any:
    """Import ``package.module:attribute``; the working directory is importable, as with ``python -m``.

    Args:
        field: The recipe's key that has the name.
        name: The name, which the user has given; or that of an entry point of this ``kind``, one of ``KINDS``.
        kind: See ``name``.

    Raises:
        UserError: The name has another form, its module cannot be imported or lacks the attribute, this cannot be
            called, or only a saved recipe names it.
    """
    if name not in _given:
        remedy = f"if you trust that code, name it yourself, as by {field}={name}"
        raise UserError(field, name, "is code that only a saved recipe names, which is not imported", remedy)
    found = [each.value for each in _entry_points(kind) if each.name == name] if kind and ":" not in name else []
    name = found[0] if found else name
    if not is_name(name):
        remedy = f"write {FORM}, such as mypackage.nets:Generator"
        raise UserError(field, name, f"must have the form {FORM}", remedy)
    module, _, path = name.partition(":")
    found = _imported(field, name, module)
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [each for each in dir(found) if each[0] != "_"], n=1)
            remedy = f"did you mean {close[0]}?" if close else f"give the name of a class or function in {module}"
            raise UserError(field, name, f"names nothing: {module} has no {part}", remedy)
        found = getattr(found, part)
    if not callable(found):
        detail = f"it is of type {type(found).__name__}"
        raise UserError(field, name, "cannot be called", "give the name of a class or function", detail)
    return found


def build(field: str, name: str, kind: str, arguments: Mapping[str, Any], offered: Mapping[str, Any]) -> Any:
    """Call what a name stands for, with ``arguments``, and with those ``offered`` that its signature names.

    Args:
        field: The recipe's key that has the name; the key ``arguments`` beside it has the arguments.
        name: See ``load``.
        kind: See ``load``.
        arguments: What the recipe gives.
        offered: What else it may take.

    Raises:
        UserError: See ``load``; an argument is unknown or missing; or the call fails.
    """
    found = load(field, name, kind)
    given = {**_taken(found, offered), **arguments}
    _check(found, name, given, f"{field.rpartition('.')[0]}.arguments".lstrip("."))
    return called(field, name, lambda: found(**given))


def called(field: str, name: str, work: Callable[[], Any], what: str = "fails") -> Any:
    """Do something in code from outside; a UserError names what it raises, and the line.

    Raises:
        UserError: It failed.
    """
    try:
        return work()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            field, name, f"{what}: {described(error)}", "fix its code, or what the recipe gives it"
        ) from error


def described(error: BaseException) -> str:
    """Return an error's type and text, and the innermost line of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {reason(error)}{where}"


def _imported(field: str, name: str, module: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        remedy = f"fix {module}"
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            remedy = "install its package, or start in the directory that has it"
        raise UserError(field, name, "cannot be imported", remedy, described(error)) from error


def _parameters(found: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of what is called, by name; None if Python does not know them."""
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError):
        return None


def _taken(found: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    named = _by_name(_parameters(found) or {})
    return {name: value for name, value in offered.items() if name in named}


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of parameters that can be given by name."""
    return [n for n, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def _check(found: Any, name: str, given: Iterable[str], keys: str) -> None:
    """Refuse arguments that a signature lacks, and those that are missing."""
    parameters = _parameters(found)
    if parameters is None:
        return
    own = _by_name(parameters)
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for key in given:
        if key not in own and not takes_all:
            close = difflib.get_close_matches(key, own, n=1)
            every = f"the arguments of {name} are {', '.join(own)}" if own else f"{name} takes none"
            raise UserError(f"{keys}.{key}", None, "unknown key", f"did you mean {close[0]}?" if close else every)
    for key, each in parameters.items():
        if each.default is not each.empty or key in given:
            continue
        if key in own:
            raise UserError(f"{keys}.{key}", None, "must be given", "add it to the recipe", f"{name} needs it")
        if each.kind is each.POSITIONAL_ONLY:
            remedy = "let it be given by its name"
            raise UserError(f"{keys}.{key}", None, f"cannot be given: {name} takes it by its place alone", remedy)


def _entry_points(kind: str) -> list[EntryPoint]:
    return list(entry_points(group=f"bigsgan.{kind}"))


def _described(kind: str, found: EntryPoint) -> Plugin:
    package = found.dist.metadata["Name"] if found.dist else ""
    return Plugin(found.name, kind, found.value, package, found.dist.version if found.dist else "")
