"""Reads settings that other trainers save with their weights, for translation to keys of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import parse_json, read_text

OPTION = "--settings"
NONE = "none"
SNAPSHOT = "the snapshot"
LARGEST = 10**12
"""Largest number that is accepted, so that calculations with it are safe."""
_MOST_UPDATES = 1 << 40
_FEW = 8
_REMEDY = f"fix or remove that file, or give {OPTION} {NONE}"


class Settings(NamedTuple):
    """Training settings of weights."""

    origin: str = ""  # the file that they are from, or `SNAPSHOT`
    keys: Mapping[str, Any] = {}  # by dotted key of a recipe, a value, a whole section, or None for no such section
    left: tuple[str, ...] = ()  # their names of settings that no recipe has, or that belong to the other machine
    told: tuple[str, ...] = ()  # their names of settings that no recipe has, and that are as here


class Options:
    """Settings of another trainer by dotted names, two levels deep; those that are read count as taken."""

    def __init__(self, path: Path, content: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> None:
        """Keep a file's content, and the trainer's defaults by dotted name."""
        self.path = path
        self._given = _two_levels(content)
        self._values = {**defaults, **self._given}
        self._taken: set[str] = set()

    def value(self, name: str) -> Any:
        """A setting; None if it is unknown."""
        self._taken.add(name)
        return self._values.get(name)

    def number(self, name: str) -> float | None:
        """A setting that is a number; None if it is not set.

        Raises:
            UserError: The setting is something else.
        """
        value = self.value(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and abs(value) <= LARGEST):  # false for NaN
            return value
        limit = f" of at most {LARGEST:g}" if is_number else ""
        problem = f"has {name} {short(value)}, which must be a number{limit}"
        raise UserError(OPTION, str(self.path), problem, _REMEDY)

    def section(self, name: str) -> dict[str, Any]:
        """All settings of a section, without its name."""
        found = {key: value for key, value in self._values.items() if key.startswith(f"{name}.")}
        self._taken |= found.keys()
        return {key.removeprefix(f"{name}."): value for key, value in found.items()}

    def leave(self, name: str) -> None:
        """Count a setting or a section as not taken after all."""
        self._taken -= {key for key in self._taken if key == name or key.startswith(f"{name}.")}

    def left(self) -> tuple[str, ...]:
        """Names of the file's settings that are on and were not taken; a section with none taken counts as one."""
        left = {name for name, value in self._given.items() if value} - self._taken
        found: dict[str, None] = {}
        for name in sorted(left):
            section = name.partition(".")[0]
            whole = not any(key.startswith(f"{section}.") for key in self._taken & self._given.keys())
            found[_printable(section if whole else name)] = None
        return tuple(found)


def read_options(path: Path) -> dict[str, Any]:
    """Read a file of settings in JSON.

    Raises:
        UserError: The file cannot be read, or is something else.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        content = parse_json(read_text(path), parse_constant=refuse)
    except OSError as error:
        raise UserError(OPTION, str(path), f"cannot be read: {reason(error, path)}", _REMEDY) from None
    except ValueError as error:
        raise UserError(OPTION, str(path), "must be valid JSON", _REMEDY, str(error)) from None
    if not isinstance(content, dict):
        raise UserError(OPTION, str(path), "must be a JSON object", _REMEDY)
    return content


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out values that are None, as those of unknown settings."""
    return {key: value for key, value in values.items() if value is not None}


def images_seen(batch: int, updates: Any) -> int | None:
    """Images in a number of updates; None if a file does not give a sensible number."""
    return batch * updates if type(updates) is int and 0 <= updates < _MOST_UPDATES else None


def half_life_nimg(batch: int, decay: float) -> int:
    """Half-life in images of an EMA that keeps the share ``decay`` of itself in each update."""
    return round(batch * math.log(0.5) / math.log(decay))


def not_of(path: Path, what: str) -> UserError:
    """Make the error for a file that contains something else."""
    return UserError(OPTION, str(path), f"must contain settings of {what}", f"give another file, or {OPTION} {NONE}")


def checked(settings: Sequence[Settings], make: Callable[[], Any]) -> Any:
    """Call ``make``, which uses settings; if they are from a file, its errors name that file.

    Raises:
        UserError: ``make`` raises one.
    """
    try:
        return make()
    except UserError as error:
        files = [each.origin for each in settings if each.origin != SNAPSHOT]
        if not files:
            raise
        raise UserError(OPTION, files[0], f"does not give a valid recipe: {error}", _REMEDY) from None


def _two_levels(content: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in content.items():
        inner = {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {}
        found |= inner or {name: value}
    return found


def _printable(name: str) -> str:
    """A name that is safe to print: a file may contain one that moves a terminal's cursor, or is very long."""
    shown = name[:60] if name.isprintable() else ascii(name[:60])
    return shown if len(name) <= 60 else f"{shown}..."


def short(value: Any) -> str:
    """A value of another program as a short text, however large or nested it is."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "of many digits"  # Python refuses to print integers of thousands of digits
    if isinstance(value, list | tuple) and len(value) <= _FEW and all(isinstance(n, int | float) for n in value):
        return f"[{', '.join(map(short, value))}]"
    text = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= 40 else f"{text[:37]}..."
