"""Words as CONTRIBUTING's rules for prose have them: Oxford spelling."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import REPOSITORY

ROOMS = ("bigsgan", "launch", "docs", "tests")
SUFFIXES = {".py", ".md", ".yaml", ".sbatch", ".sh"}
BRITISH = re.compile(r"([a-z]+is)(?:e[ds]?|ers?|ing|ations?)")
PART_OF_A_NAME = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
ALSO_OXFORD = re.compile(
    r".*(?:rais|ois|wis|vis|guis|pris|promis|precis|concis|exercis|expertis)|a?ris"  # raise, noise, otherwise, revise
)
MISSPELT_ON_PURPOSE = re.compile("zero_optimisation|basic_optimiser|reduce_bucket_sise")


def written() -> Iterator[Path]:
    """Files with prose or names of ours."""
    yield from (REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"))
    for room in ROOMS:
        for path in (REPOSITORY / room).rglob("*"):
            if path.suffix in SUFFIXES and REPOSITORY / "tests" / "data" not in path.parents:
                yield path


def british(text: str) -> list[str]:
    """Words and parts of names that end in -ise or alike, where Oxford spelling has -ize."""
    words = (word.lower() for word in PART_OF_A_NAME.findall(MISSPELT_ON_PURPOSE.sub("", text)))
    return [word for word in words if (found := BRITISH.fullmatch(word)) and not ALSO_OXFORD.fullmatch(found[1])]


def test_spelling_is_oxford():
    found = {str(path.relative_to(REPOSITORY)): british(path.read_text()) for path in written()}
    assert len(found) > 600
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("stem", ["penal", "regular", "Optim", "RECOGN", "critic", "summar"])
def test_british_spelling_is_noticed(stem):
    for ending in ("ise", "ised", "ising", "isation"):
        word = stem + (ending.upper() if stem.isupper() else ending)
        assert british(f"a {word}, _{word}_of") == [word.lower()] * 2
    assert british(f"{stem}ized, is raised otherwise, as the noise rises; revise, analyse, colour, size, this") == []
