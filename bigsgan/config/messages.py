"""Turns pydantic's findings into one message of ours: field, value, problem, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from bigsgan.errors import UserError

_PROBLEMS = {
    "int_type": "is not an integer",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not a string",
    "literal_error": "is none of the choices",
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "finite_number": "is not finite",
    "list_type": "is not a list",
    "too_short": "has too few entries",
    "too_long": "has too many entries",
    "model_type": "is not a section",
}

_REMEDIES = {
    "int_type": "write an integer such as 64",
    "float_type": "write a number such as 1e-4",
    "bool_type": "write true or false",
    "string_type": "write text, in quotes where it looks like something else",
    "literal_error": "choose from {expected}",
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give at least {ge}",
    "less_than": "give less than {lt}",
    "less_than_equal": "give at most {le}",
    "finite_number": "write a finite number",
    "list_type": "write a list such as [0.0, 0.999]",
    "too_short": "give at least {min_length} entries",
    "too_long": "give at most {max_length} entries",
    "model_type": "write its keys below it",
}


def explain(error: ValidationError, root: type[BaseModel]) -> UserError:
    """Return the message for the finding that helps most.

    An unknown key comes first, because a misspelt key is missing under its right name too.
    """
    finding = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    path = [str(part) for part in finding["loc"]]
    field, kind, found = ".".join(path), finding["type"], finding["input"]
    if kind == "extra_forbidden":
        return UserError(field, found, "is given for a key that does not exist", _other_keys(path, root))
    if kind == "missing":
        return UserError(field, None, "is missing", "add it to the recipe")
    if isinstance(found, dict) and kind != "model_type":
        return UserError(field, None, "is a section where a value belongs", "write the value alone")
    # ``None`` as a value is left out of the text, so that null has to be named in the problem.
    problem = ("null " if found is None else "") + _PROBLEMS.get(kind, "is not allowed")
    if kind == "int_type" and isinstance(found, float) and found.is_integer():
        return UserError(field, found, problem, f"write {int(found)}")
    remedy = _REMEDIES[kind].format(**finding.get("ctx", {})) if kind in _REMEDIES else finding["msg"]
    return UserError(field, found, problem, remedy)


def _other_keys(path: list[str], root: type[BaseModel]) -> str:
    """Name the key that was meant: one spelt almost so, one of the same name elsewhere, or all of the section."""
    section = _section_at(path[:-1], root)
    close = difflib.get_close_matches(path[-1], section.model_fields, n=1)
    if close:
        return f"did you mean {'.'.join([*path[:-1], close[0]])}?"
    elsewhere = [key for key in _all_keys(root) if key.rpartition(".")[2] == path[-1]]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known keys here: {', '.join(section.model_fields)}"


def _section_at(path: list[str], root: type[BaseModel]) -> type[BaseModel]:
    section = root
    for key in path:
        section = _sections_of(section.model_fields[key].annotation)[0]
    return section


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for below in _sections_of(field.annotation):
            yield from _all_keys(below, f"{prefix}{name}.")


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Sections that a field's type allows: one for ``Penalty`` and ``Penalty | None``, none for numbers and text."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return [each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)]
