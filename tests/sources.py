"""The repository's Python files as syntax trees."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

from tests import REPOSITORY


def trees(*rooms: str) -> Iterator[tuple[Path, str, ast.Module]]:
    """Path, text and tree of each file; the garbage collector would take most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for path in sorted(path for room in rooms for path in (REPOSITORY / room).rglob("*.py")):
            text = path.read_text()
            yield path, text, ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements at any depth, without the expressions in them, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, name, None)
        for child in children if isinstance(children, list) else ():
            yield child
            yield from statements(child)
