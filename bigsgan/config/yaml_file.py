"""Reads and writes YAML, with numbers and booleans as in YAML 1.2.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``no`` is False, ``010`` is 8, and the last of two equal keys
wins. This loader follows YAML 1.2 and refuses duplicate keys. Recipes and command-line overrides both use it.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from bigsgan import shipped
from bigsgan.errors import UserError, reason
from bigsgan.runtime.paths import read_text

_MOST_BYTES = 1 << 18
_MOST_VALUES = 10_000
"""Limit for a document. An alias counts as the values it stands for: a few lines of aliases can mean 2^100 values."""


class _Loader(yaml.SafeLoader):
    # Filled below: PyYAML's own table reads YAML 1.1.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (an instance attribute to type checkers)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a duplicate key."""
        if not isinstance(node, yaml.MappingNode):
            raise yaml.MarkedYAMLError(problem="!!map must tag a mapping", problem_mark=node.start_mark)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is not a string", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key!r}", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_truth(self, node: yaml.ScalarNode) -> bool:
        """Read true or false."""
        text = self.construct_scalar(node)
        if text.lower() not in ("true", "false"):
            raise ValueError(f"must be true or false, got {text!r}")
        return text.lower() == "true"

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Read an integer in base ten; underscores may group its digits."""
        return int(self.construct_scalar(node).replace("_", ""))

    def construct_real(self, node: yaml.ScalarNode) -> float:
        """Read a floating-point number; the recipe refuses infinities and NaN."""
        text = self.construct_scalar(node).replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    # PyYAML's other tags (!!timestamp, !!set) are left out, as they raise all kinds of errors.
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        "tag:yaml.org,2002:null": yaml.SafeLoader.construct_yaml_null,
        "tag:yaml.org,2002:bool": construct_truth,
        "tag:yaml.org,2002:int": construct_decimal,
        "tag:yaml.org,2002:float": construct_real,
        "tag:yaml.org,2002:str": yaml.SafeLoader.construct_yaml_str,
        "tag:yaml.org,2002:seq": yaml.SafeLoader.construct_yaml_seq,
        "tag:yaml.org,2002:map": yaml.SafeLoader.construct_yaml_map,
        None: yaml.SafeLoader.construct_undefined,
    }


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a recipe file into nested dictionaries.

    Raises:
        UserError: The file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        text = read_text(path, _MOST_BYTES)
    except FileNotFoundError:
        close = difflib.get_close_matches(path.stem, shipped.recipe_names(), n=1, cutoff=0.75)
        remedy = "give the path of a recipe, or the name of a built-in one such as digits"
        remedy = f"did you mean {close[0]}?" if close and path.parent == Path() else remedy
        raise UserError("--config", str(path), "does not exist", remedy) from None
    except (OSError, ValueError) as error:
        problem = f"cannot be read: {reason(error, path)}"
        raise UserError("--config", str(path), problem, "give a readable text file") from None
    try:
        loaded = _parse(text)
    except ValueError as error:
        raise UserError(str(path), None, f"must be valid YAML: {error}", "fix that line") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError(str(path), loaded, "must be a mapping", "write `key: value` lines")
    return loaded


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> None:
    """Apply overrides of the form ``dotted.key=value`` to ``tree``, in place and in order.

    Raises:
        UserError: An override is malformed, replaces an earlier one, or its key is below one that holds a value.
    """
    given: list[list[str]] = []
    for text in overrides:
        keys, value = parse_override(text)
        for earlier in given:
            if earlier == keys:
                raise UserError(".".join(keys), None, "must be given once, got two overrides", "remove one of them")
            if earlier[: len(keys)] == keys:
                name = ".".join(earlier)
                raise UserError(".".join(keys), None, f"replaces the earlier override {name}", f"put it before {name}")
        given.append(keys)
        apply_override(tree, keys, value)


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=value`` into (["a", "b"], value), the value read as YAML.

    Raises:
        UserError: There is no ``=``, a key is empty, or the value is not YAML.
    """
    dotted, equals, value = text.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not equals and text.endswith((".yaml", ".yml")):
        raise UserError("override", text, "must have the form dotted.key=value", f"write --config {text}")
    if not equals and (close := difflib.get_close_matches(text, shipped.recipe_names(), n=1, cutoff=0.75)):
        raise UserError("override", text, "must have the form dotted.key=value", f"did you mean --config {close[0]}?")
    if not equals or not all(keys):
        remedy = "write it like optimizer.generator.lr=1e-4"
        raise UserError("override", text, "must have the form dotted.key=value", remedy)
    try:
        return keys, _parse(value)
    except ValueError as error:
        raise UserError(dotted, value, "must be a YAML value", "fix or quote it", str(error)) from None


def apply_override(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set ``tree[a][b] = value`` in place, and make missing sections.

    Raises:
        UserError: ``tree[a]`` holds a value and not a section.
    """
    for depth, key in enumerate(keys[:-1]):
        below = tree.get(key)
        if not isinstance(below, dict | None):
            name = ".".join(keys[: depth + 1])
            raise UserError(".".join(keys), None, f"unknown key: {name} is a value, not a section", f"override {name}")
        # A copy: with YAML's anchors, two keys may share one section, and the override is for one of them.
        tree[key] = tree = dict(below or {})
    tree[keys[-1]] = value


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return nested dictionaries as YAML that ``read_yaml`` reads back unchanged."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def _parse(text: str) -> Any:
    """Read one YAML document; raise ValueError, with one line, if it is invalid."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _count(node, {}) > _MOST_VALUES:
            raise ValueError(f"it holds more than {_MOST_VALUES} values, aliases counted each time")
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem}{where}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _count(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return how many values a node holds, aliases resolved; ``known`` caches counts, None while one is computed."""
    if id(node) not in known:
        known[id(node)] = None
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        each = [part for pair in below for part in pair] if isinstance(node, yaml.MappingNode) else below
        known[id(node)] = 1 + sum(_count(part, known) for part in each)
    found = known[id(node)]
    if found is None:
        raise yaml.MarkedYAMLError(problem="an anchor holds an alias of itself", problem_mark=node.start_mark)
    return found
