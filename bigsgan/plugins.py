"""Code from outside the package that a recipe names, as ``package.module:attribute`` or by an entry point.

Only names that the user has given are imported: in a recipe, an override, an option or a call. A checkpoint, an export
or a file of a hub names code too, but its author may be anybody.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from bigsgan.errors import UserError, reason

KINDS = ("families", "terms", "data", "metrics", "callbacks")
"""What entry points of the groups ``bigsgan.KIND`` name."""

FORM = "package.module:attribute"

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_given: set[str] = set()
"""The names that the user of this process has given."""

_loaded: dict[str, tuple[str, str]] = {}
"""File and attribute of what was imported, by its key and name in the recipe."""


class UntrustedError(UserError):
    """Only a checkpoint, an exported file or a saved recipe names code from outside."""


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
    return sorted({found.name for found in _entry_points(kind)})


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
            called, two packages offer the name for different code, or only a saved file names it.
    """
    if name not in _given:
        remedy = f"if you trust that code, name it yourself, as by {field}={name}, or restore the run's config.yaml"
        raise UntrustedError(field, name, "is code that only a saved file names, which is not imported", remedy)
    key = f"{field}={name}"
    name = _target(field, name, kind) if kind and ":" not in name else name
    if not is_name(name):
        remedy = f"write {FORM}, such as mypackage.nets:Generator"
        raise UserError(field, name, f"must have the form {FORM}", remedy)
    module, _, path = name.partition(":")
    found = _imported(field, name, module)
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [each for each in dir(found) if each[0] != "_"], n=1)
            remedy = f"did you mean {close[0]}?" if close else f"give the name of a class or function in {module}"
            raise UserError(field, name, f"is not in {module}, which has no {part}", remedy)
        found = getattr(found, part)
    if not callable(found):
        detail = f"it is of type {type(found).__name__}"
        raise UserError(field, name, "cannot be called", "give the name of a class or function", detail)
    origin = sys.modules.get(getattr(found, "__module__", module), sys.modules[module])
    _loaded[key] = str(getattr(origin, "__file__", None)), path.rpartition(".")[2]
    return found


def note_origin(error: BaseException) -> None:
    """Note in an error which keys of the recipe name the code that it comes through, if any do."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = {key: attribute for key, (file, attribute) in _loaded.items() if file in {f.co_filename for f in frames}}
    if sys.version_info >= (3, 11) and inside:
        names = {part for frame in frames for part in frame.co_qualname.split(".")}
        exact = [key for key, attribute in inside.items() if attribute in names]
        error.add_note(f"bigsgan: this code is from outside, {' or '.join(exact or inside)}")


def called(field: str, name: str, work: Callable[[], Any], where: str = "") -> Any:
    """Do something in code from outside; a UserError names what it raises, and the line. ``where`` is as " in compute".

    Raises:
        UserError: It failed.
    """
    try:
        return work()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit` would end one rank alone
        raise UserError(
            field, name, f"fails{where}: {described(error)}", "fix its code, or what the recipe gives it"
        ) from error


def described(error: BaseException) -> str:
    """Return an error's type and text, and the innermost line of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {reason(error)}{where}"


def _target(field: str, name: str, kind: str) -> str:
    """Return what an entry point of this name stands for, or the name if there is none."""
    found = {each.target: each for each in installed() if (each.kind, each.name) == (kind, name)}
    if len(found) > 1:
        offered = " and ".join(f"{each.target} of {each.package}" for each in found.values())
        raise UserError(field, name, f"is the name of {offered}", f"write the one that you mean, as {FORM}")
    return next(iter(found), name)


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


def _entry_points(kind: str) -> tuple[EntryPoint, ...]:
    return _offered(kind, tuple(map(_state_of, sys.path)))


@functools.lru_cache  # they are read from a file of each installed package, and asked for several times in each recipe
def _offered(kind: str, states: tuple[object, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"bigsgan.{kind}"))


def _state_of(directory: str) -> tuple[str, int, int]:
    """Return what changes where a package is installed in a directory of the path, or the working directory changes."""
    try:
        found = os.stat(directory or ".")
    except OSError:
        return directory, 0, 0
    return directory, found.st_ino, found.st_mtime_ns


def _described(kind: str, found: EntryPoint) -> Plugin:
    package = found.dist.metadata["Name"] if found.dist else ""
    return Plugin(found.name, kind, found.value, package, found.dist.version if found.dist else "")
