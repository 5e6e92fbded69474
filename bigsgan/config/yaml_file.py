"""Reads YAML as people write it.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``no`` is False, ``010`` is 8, and the last of two equal keys
wins. This loader reads numbers and booleans as YAML 1.2 does and refuses duplicate keys; recipes and command-line
overrides both go through it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from bigsgan.errors import UserError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own way to configure a loader class)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice in one mapping."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is not a string", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} stands twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        """Read an integer in base ten; underscores may group its digits."""
        return int(node.value.replace("_", ""))

    def construct_real(self, node: yaml.ScalarNode) -> float:
        """Read a floating-point number; infinities and NaN are left to the recipe to refuse."""
        text = node.value.replace("_", "").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"true|false", "tf"),
    ("tag:yaml.org,2002:null", r"null|~|", ["n", "~", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
):
    _Loader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_real)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a recipe file into nested dictionaries.

    Raises:
        UserError: The file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("--config", str(path), "does not exist", "give the path of a recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--config", str(path), f"cannot be read ({error})", "give a readable text file") from None
    try:
        loaded = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError("--config", str(path), f"is not valid YAML: {_one_line(error)}", "mend that line") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UserError("--config", str(path), "holds no mapping", "write `key: value` lines")
    return loaded


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=value`` into (["a", "b"], value), the value read as YAML.

    Raises:
        UserError: There is no ``=``, a key is empty, or the value is not YAML.
    """
    dotted, equals, value = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise UserError("override", text, "is not of the form dotted.key=value", "write it like optimizer.generator.lr=1e-4")
    try:
        return keys, yaml.load(value, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(dotted, value, f"is not a YAML value: {_one_line(error)}", "quote it or mend it") from None


def apply_override(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set ``tree[a][b] = value`` in place, making sections on the way.

    Raises:
        UserError: A key on the way holds a value and not a section.
    """
    for depth, key in enumerate(keys[:-1]):
        below = tree.get(key)
        if below is None:
            below = tree[key] = {}
        if not isinstance(below, dict):
            name = ".".join(keys[: depth + 1])
            raise UserError(".".join(keys), value, f"goes below {name}, which is a value", f"override {name} itself")
        tree = below
    tree[keys[-1]] = value


def dump_yaml(tree: dict[str, Any]) -> str:
    """Write nested dictionaries as YAML that ``read_yaml`` reads back unchanged."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes floats with a dot and strings so that both YAML 1.1 and 1.2 readers see the same types."""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
