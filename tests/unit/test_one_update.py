"""docs/explanation/one-update.md: each name is defined in the file and line that follow it.

python -m tests.unit.test_one_update    brings the lines up to date
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "bigsgan"
PAGE = REPOSITORY / "docs" / "explanation" / "one-update.md"
PLACE = re.compile(r"`(?P<name>[\w.]+)`(?P<space>\s)\(`(?P<path>[\w/]+\.py)(?::(?P<line>\d+))?`\)")


def line_of(name: str, path: Path) -> int:
    """The line of a function or class, or of one inside a class."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
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


@pytest.mark.parametrize("match", [*PLACE.finditer(PAGE.read_text())], ids=lambda match: match["name"])
def test_a_name_is_where_the_page_says(match):
    line = line_of(match["name"], PACKAGE / match["path"])
    assert match["line"] == str(line), "python -m tests.unit.test_one_update brings the lines up to date"


def test_no_name_stands_without_its_line():
    assert up_to_date(PAGE.read_text()) == PAGE.read_text()
    assert len(PLACE.findall(PAGE.read_text())) > 20


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text()))
