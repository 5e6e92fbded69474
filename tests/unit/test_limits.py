"""Sizes that CONTRIBUTING's house style allows: lines of a file and of a function, parameters of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests import REPOSITORY
from tests.sources import statements, trees

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 400, 60, 8


def too_large(text: str, tree: ast.Module) -> Iterator[str]:
    """What exceeds a limit. Parameters of Triton's kernels do not count: a kernel takes no records."""
    if (num := len(text.splitlines())) > MOST_LINES:
        yield f"the file has {num} lines"
    for node in statements(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        num = node.end_lineno - node.lineno + 1
        if num > MOST_LINES_OF_A_FUNCTION:
            yield f"{node.name} has {num} lines"
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        names += [each.arg for each in (given.vararg, given.kwarg) if each]
        num = len([name for name in names if name not in ("self", "cls")])
        if num > MOST_PARAMETERS and not any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
            yield f"{node.name} has {num} parameters"


def test_sizes():
    found = {
        str(path.relative_to(REPOSITORY)): [*too_large(text, tree)]
        for path, text, tree in trees("bigsgan", "launch", "docs")
    }
    assert len(found) > 250
    assert {path: problems for path, problems in found.items() if problems} == {}
