"""Words as CONTRIBUTING's rules for prose have them: Oxford spelling, and messages that are predicates."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import REPOSITORY
from tests.sources import statements, trees

ROOMS = ("bigsgan", "launch", "docs", "tests")
SUFFIXES = {".py", ".md", ".yaml", ".sbatch", ".sh"}
BRITISH = re.compile(r"([a-z]+is)(?:e[ds]?|ers?|ing|ations?)")
PART_OF_A_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
ALSO_OXFORD = re.compile(
    r".*(?:rais|ois|wis|vis|guis|pris|promis|precis|concis|exercis|expertis)|a?ris"  # raise, noise, otherwise, revise
)
MISSPELT_ON_PURPOSE = re.compile("zero_optimisation|basic_optimiser|reduce_bucket_sise")

BEGINNINGS = {
    *("must", "cannot", "needs", "has", "is", "are", "does not", "contains", "lacks", "exists", "unknown key"),
    *(
        "sets",
        "makes",
        "joins",
        "fails",
        "finds",
        "differs",
        "shifts",
        "belongs",
        "replaces",
        "keeps",
        "changes",
        "unknown option",
    ),
}
"""With what the problem of a UserError begins: a predicate in the present tense, or "unknown" and what nobody knows."""
PREDICATE = re.compile(rf"({'|'.join(sorted(BEGINNINGS))})\b")


def written() -> Iterator[Path]:
    """Files with prose or names of ours."""
    yield from (REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"))
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*"):
            if path.suffix in SUFFIXES and REPOSITORY / "tests" / "data" not in path.parents:
                yield path


def british(text: str) -> list[str]:
    """Words and parts of names that end in -ise or alike, where Oxford spelling has -ize."""
    words = {word.lower() for word in PART_OF_A_NAME.findall(MISSPELT_ON_PURPOSE.sub("", text))}
    return [word for word in words if (found := BRITISH.fullmatch(word)) and not ALSO_OXFORD.fullmatch(found[1])]


def test_spelling_is_oxford():
    found = {str(path.relative_to(REPOSITORY)): british(path.read_text()) for path in written()}
    assert len(found) > 600
    assert {path: words for path, words in found.items() if words} == {}


def assigned(function: ast.AST) -> dict[str, list[ast.expr]]:
    """What a function assigns to each of its names."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(value)
    return found


def beginnings(problem: ast.expr, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The texts with which a problem may begin, as far as they are written where it is made."""
    match problem:
        case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text
        case ast.JoinedStr(values=[ast.FormattedValue(value=first), *_]) if ast.unparse(first) != "problem":
            yield f"{{{ast.unparse(first)}}}"
        case ast.BinOp():
            yield from beginnings(problem.left, names)
        case ast.IfExp():
            yield from beginnings(problem.body, names)
            yield from beginnings(problem.orelse, names)
        case ast.Name():
            for value in names.get(problem.id, []):
                yield from beginnings(value, names)


def problems(text: str, tree: ast.Module) -> set[str]:
    """Beginnings of the problems of all UserErrors in a file."""
    found, lines = set(), text.splitlines()
    for function in statements(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any("UserError(" in line for line in lines[function.lineno : function.end_lineno]):
            continue
        names: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Name(id="UserError"), args=[_, _, problem, *_]):
                    names = names or assigned(function)
                    found |= set(beginnings(problem, names))
    return found


def test_messages_are_predicates_in_the_present_tense():
    found = {path: problems(text, tree) for path, text, tree in trees("bigsgan")}
    assert sum(map(len, found.values())) > 400
    assert [text for each in found.values() for text in each if not PREDICATE.match(text)] == []
    used = {PREDICATE.match(text)[1] for each in found.values() for text in each}
    assert used == BEGINNINGS
