"""Turns pydantic's findings into one message of ours: field, value, problem, remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

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
    path, section = _locate([str(part) for part in finding["loc"]], root)
    field, kind, found = ".".join(path), finding["type"], finding["input"]
    if kind == "no_home":
        return UserError(field, found, finding["ctx"]["problem"], "write the whole path")
    if kind == "extra_forbidden":
        remedy = _other_keys(path, section, root)
        return UserError(field, found, "is given for a key that does not exist", remedy)
    if kind == "union_tag_invalid":
        tag, known = finding["ctx"]["tag"], finding["ctx"]["expected_tags"]
        return UserError(f"{field}.family", tag, _PROBLEMS["literal_error"], f"choose from {known}")
    if kind == "union_tag_not_found":
        return UserError(f"{field}.family", None, "is no family", f"choose from {', '.join(_families(section, path))}")
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


def _other_keys(path: list[str], section: type[BaseModel], root: type[BaseModel]) -> str:
    """Name the key that was meant: one spelt almost so, one of the same name elsewhere, or all of the section."""
    close = difflib.get_close_matches(path[-1], section.model_fields, n=1)
    if close:
        return f"did you mean {'.'.join([*path[:-1], close[0]])}?"
    own = ".".join(path)  # which is a key where a network has another family
    elsewhere = {key: None for key in _all_keys(root) if key.rpartition(".")[2] == path[-1] and key != own}
    if own in _all_keys(root):
        family = section.model_fields["family"].default
        return f"family {family} has the keys {', '.join(section.model_fields)}; write the whole section anew"
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"known keys here: {', '.join(section.model_fields)}"


def _locate(location: list[str], root: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """Follow a finding's location: its keys, without pydantic's tags of unions, and the section of the last one."""
    path: list[str] = []
    section, below = root, [root]
    for part in location:
        tagged = [each for each in below if len(below) > 1 and part in _tags(each)]
        if tagged:
            below = tagged
            continue
        section = below[0] if below else section
        path.append(part)
        field = section.model_fields.get(part)
        below = _sections_of(field.annotation) if field else []
    return path, section


def _families(section: type[BaseModel], path: list[str]) -> list[str]:
    """Names of the families that a network's section may have."""
    return [tag for each in _sections_of(section.model_fields[path[-1]].annotation) for tag in _tags(each)]


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    """What tells a section of a union from the others."""
    return get_args(section.model_fields["family"].annotation)


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for below in _sections_of(field.annotation):
            yield from _all_keys(below, f"{prefix}{name}.")


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Sections that a field's type allows: none for numbers and text, several where a tag tells them apart."""
    candidates = [annotation, *get_args(annotation)]
    plain = [get_args(each)[0] if get_origin(each) is Annotated else each for each in candidates]
    return [each for each in plain if isinstance(each, type) and issubclass(each, BaseModel)]
