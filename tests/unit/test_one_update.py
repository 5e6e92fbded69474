"""docs/explanation/one-update.md: each name is defined in the file and line that follow it.

python -m tests.unit.test_one_update    brings the lines up to date
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests import REPOSITORY

PACKAGE = REPOSITORY / "bigsgan"
PAGE = REPOSITORY / "docs" / "explanation" / "one-update.md"
PLACE = re.compile(r"`(?P<name>[\w.]+)`(?P<space>\s)\(`(?P<path>[\w/]+\.py)(?::(?P<line>\d+))?`\)")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def line_of(name: str, path: Path) -> int:
    """The line of a function or class, or of one inside a class."""
    nodes: list[ast.AST] = [parsed(path)]
    for part in name.split("."):
        nodes = [
            child for node in nodes for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == part
        ]
    (found,) = nodes
    return found.lineno


def up_to_date(text: str) -> str:
    """The page with the lines as they are now."""

    def place(match: re.Match[str]) -> str:
        line = line_of(match["name"], PACKAGE / match["path"])
        return f"`{match['name']}`{match['space']}(`{match['path']}:{line}`)"

    return PLACE.sub(place, text)


def test_each_name_is_where_the_page_says():
    said = "python -m tests.unit.test_one_update brings the lines up to date"
    assert up_to_date(PAGE.read_text()) == PAGE.read_text(), said
    assert len(PLACE.findall(PAGE.read_text())) > 20


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text()))
