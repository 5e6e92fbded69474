"""Turns pydantic's validation errors into one ``UserError``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from bigsgan import plugins
from bigsgan.errors import UserError, counted

_TEXTS = {
    "int_type": ("must be an integer", "write an integer such as 64"),
    "float_type": ("must be a number", "write a number such as 1e-4"),
    "bool_type": ("must be true or false", "write true or false"),
    "string_type": ("must be a string", "put the text in quotes"),
    "literal_error": ("must be {expected}", "choose one of these"),
    "greater_than": ("must be greater than {gt}", "give a larger number"),
    "greater_than_equal": ("must be at least {ge}", "give a larger number"),
    "less_than": ("must be less than {lt}", "give a smaller number"),
    "less_than_equal": ("must be at most {le}", "give a smaller number"),
    "finite_number": ("must be a finite number", "write a number such as 1e-4"),
    "list_type": ("must be a list", "write a list such as [0.0, 0.999]"),
    "too_short": ("must have at least {min_length}", "add entries"),
    "too_long": ("must have at most {max_length}", "remove entries"),
    "model_type": ("must be a section", "write its keys below it"),
    "dict_type": ("must be a section", "write its keys below it"),
    "string_pattern_mismatch": ("must be letters, digits and _, a letter first", "write a name such as brightness"),
    "invalid-json-value": ("must be a text, a number, a list or a section", "put it in quotes"),
}
"""Problem and remedy for each type of error."""

_CLOSE = 0.75  # progan is not r3gan


def explain(error: ValidationError, root: type[BaseModel]) -> UserError:
    """Return the message for the most helpful of the errors.

    An unknown key comes first: if a key is misspelt, the right one is often missing too. Of a section that may be a
    name instead, its keys count, and of a list that may be a number, its entries.
    """
    findings = error.errors()

    def rank(each: Any) -> tuple[bool, bool]:
        is_other = each["type"] in ("literal_error", "int_type") and isinstance(each["input"], dict | list)
        return each["type"] != "extra_forbidden", is_other

    finding = min(findings, key=rank)
    path, section = _locate(finding["loc"], root)
    field, kind, found = ".".join(path), finding["type"], finding["input"]
    if kind == "unfit":  # by a validator of ours
        return UserError(field, found, finding["ctx"]["problem"], finding["ctx"]["remedy"])
    if kind == "extra_forbidden":
        return UserError(field, None, "unknown key", _other_keys(path, section, root))
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        given = finding["ctx"]["tag"] if kind == "union_tag_invalid" else None
        below = _sections_of(section.model_fields[path[-1]].annotation)
        *most, last = [repr(tag) for each in below for tag in _tags(each)]
        problem = f"must be {', '.join(most)} or {last}"
        return UserError(f"{field}.family", given, problem, choose(given, problem))
    if kind == "missing":
        return UserError(field, None, "must be given", "add it to the recipe")
    if isinstance(found, dict) and kind == "list_type":
        problem, remedy = _list_of(section.model_fields.get(path[-1]), found, _problem(finding))
        return UserError(field, None, f"{problem}, got a section", remedy)
    if isinstance(found, dict) and kind != "model_type":
        return UserError(field, None, "must be a single value, got a section", "write the value alone")
    problem, remedy = _problem(finding), _TEXTS.get(kind, ("", finding["msg"]))[1]
    # A key with a choice of types has an error of each.
    choices = [_problem(each) for each in findings if _locate(each["loc"], root)[0] == path]
    if len(choices) > 1:
        *most, last = dict.fromkeys(text.removeprefix("must be ") for text in choices)
        problem, remedy = f"must be {', '.join(most)} or {last}", "give one of these"
    if found is None:  # UserError leaves a value of None out of the text
        problem += ", got null"
        if kind == "string_type":
            remedy = "give a value, or put the text in quotes if it is null"
    if kind == "literal_error":
        remedy = choose(found, problem)
    if kind == "list_type" and len(choices) == 1:
        problem, remedy = _list_of(section.model_fields.get(path[-1]), found, problem)
    if kind == "int_type" and isinstance(found, float) and found.is_integer():
        remedy = f"write {int(found)}"
    return UserError(field, found, problem, remedy)


def _list_of(field: FieldInfo | None, found: object, problem: str) -> tuple[str, str]:
    """Return problem and remedy for a value in place of a list: what the list may have in it."""
    types = [field.annotation, *get_args(field.annotation)] if field else []
    of = next((get_args(each)[0] for each in types if get_origin(each) is list), None)
    if isinstance(found, str) and _fits(of, found):
        return problem, f"write [{found}]"
    if below := _sections_of(of):
        return f"{problem} of sections", f"write a list such as [{{{next(iter(below[0].model_fields))}: ...}}]"
    if get_origin(of) is not Literal:
        return problem, _TEXTS["list_type"][1]
    names = get_args(of)
    *most, last = map(repr, names)
    close = difflib.get_close_matches(str(found), names, n=1, cutoff=_CLOSE)
    remedy = f"did you mean [{close[0]}]?" if close else f"write a list such as [{names[0]}]"
    return f"{problem} of {', '.join(most)} or {last}", remedy


def _fits(annotation: Any, value: object) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value, strict=True)
        return True
    except (ValidationError, UserError):
        return False


def _problem(finding: Any) -> str:
    """Return what an error of pydantic requires."""
    limits = finding.get("ctx", {})
    if finding["type"] == "unfit":  # by a validator of ours
        return str(limits["problem"])
    numbers = {key: f"{n:g}" if isinstance(n, float) else n for key, n in limits.items()}
    numbers |= {key: counted(n, "entry") for key, n in limits.items() if key.endswith("_length")}
    return _TEXTS.get(finding["type"], ("must be valid", ""))[0].format(**numbers)


def choose(found: object, problem: str) -> str:
    """Return the remedy for a text that is none of the names in ``problem``: a similar name, or any of them."""
    names = re.findall(r"'(\w[^']*)'", problem) or problem.split(", ")  # argparse quotes them up to Python 3.11
    close = difflib.get_close_matches(str(found), names, n=1, cutoff=_CLOSE)
    return f"did you mean {close[0]}?" if close else "choose one of these"


def _other_keys(path: list[str], section: type[BaseModel], root: type[BaseModel]) -> str:
    """Suggest the key that was meant: a similar one, one of the same name elsewhere, or all keys of the section."""
    close = difflib.get_close_matches(path[-1], section.model_fields, n=1)
    if "arguments" in section.model_fields and {"family", "use"} & section.model_fields.keys() and not close:
        return f"give an argument of its function as {'.'.join([*path[:-1], 'arguments', path[-1]])}"
    if close:
        return f"did you mean {'.'.join([*path[:-1], close[0]])}?"
    own = ".".join(path)  # it may be a key of another family
    elsewhere = {key: None for key in all_keys(root) if key.rpartition(".")[2] == path[-1] and key != own}
    if own in all_keys(root):
        family = section.model_fields["family"].default
        return f"replace the whole section: family {family} has the keys {', '.join(section.model_fields)}"
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"the keys of this section are {', '.join(section.model_fields)}"


def _locate(location: Sequence[str | int], root: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """Return an error's keys, without pydantic's names for the choices of a union, and the section of the last one."""
    path: list[str] = []
    section, below = root, [root]
    for each in location:
        part = str(each)
        if isinstance(each, int):  # a place in a list, of sections or of values
            path.append(part)
            continue
        if not below and isinstance(each, str):  # below a key that holds no section
            continue
        if below and (part.startswith("literal[") or part in (each.__name__ for each in below)):  # a name, or a section
            continue
        tagged = [each for each in below if len(below) > 1 and part in _tags(each)]
        if tagged:
            below = tagged
            continue
        section = below[0] if below else section
        path.append(part)
        field = section.model_fields.get(part)
        below = _sections_of(field.annotation) if field else []
    return path, section


def _tags(section: type[BaseModel]) -> tuple[Any, ...]:
    """Return the values of ``family`` that select a section of a union."""
    family = section.model_fields["family"]
    return get_args(family.annotation) or (*plugins.names("families"), family.default)


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section, those of all families among them."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for below in _sections_of(field.annotation):
            yield from all_keys(below, f"{prefix}{name}.")


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that a field's type allows: none for a number or text, several for a union."""
    candidates = [annotation, *get_args(annotation)]
    plain = [get_args(each)[0] if get_origin(each) is Annotated else each for each in candidates]
    return [each for each in plain if isinstance(each, type) and issubclass(each, BaseModel)]
