"""Runs tests of a clone of the repository as checks: tests/gpu and tests/stand_in are a group each.

The lists of checks are with the tests, because their own runner (`python -m tests.gpu`) reads them too. No torch here.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

from bigsgan.doctor.checks import Check, Finding, Need, Subject, failed, not_applicable, passed

REPOSITORY = Path(__file__).parents[2]
LISTS: dict[str, tuple[str, str, tuple[Need, ...]]] = {
    "gpu": ("gpu.__main__", "what tests/gpu shows", ("gpu", "only")),
    "stand_in": ("stand_in.checks", "what tests/stand_in shows without a GPU", ("only",)),
}
"""By group: the module of `tests` with its CHECKS, what they show, and what they need."""

LOGS = Path("doctor_logs")
"""Directory below the working directory, for what the tests print."""

_OF_A_LAUNCHER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_\w+|MASTER_\w+|CROSS_\w+|GROUP_\w+|ROLE_\w+|TORCHELASTIC_\w+)")
_PASSED = re.compile(r"\b\d+ passed\b")
_MOST_LETTERS = 200


def checks() -> tuple[Check, ...]:
    """The checks of all lists, or for a list that is missing here, one check that says so."""
    found = []
    for group, (_, shows, needs) in LISTS.items():
        module = _list_of(group)
        if module is None:
            found.append(Check(f"{group}.tests", shows, 1, "clone:absent", needs))
            continue
        for each in module.CHECKS:
            name = f"{group}.{each.name.lower().replace(' ', '_')}"
            found.append(Check(name, each.proves, each.seconds, "clone:test", needs, (group, each.name)))
    return tuple(found)


def absent(subject: Subject) -> Finding:
    """Report that this is not a clone of the repository."""
    return not_applicable("needs a clone of the repository, whose tests are run")


def test(subject: Subject, group: str, name: str) -> Finding:
    """Run one command of a list on rank 0, as the list's own runner does, and without the launcher's variables."""
    module = _list_of(group)
    if module is None:
        return absent(subject)
    if subject.ranks.rank:
        return passed("rank 0 runs it", severity=-1)
    check = next(each for each in module.CHECKS if each.name == name)
    log = LOGS.absolute() / f"{group}.{name.replace(' ', '_')}.log"
    log.parent.mkdir(exist_ok=True)
    launcher = {name: os.environ.pop(name) for name in list(os.environ) if _OF_A_LAUNCHER.fullmatch(name)}
    try:
        result = module.run(check, log)
    finally:
        os.environ.update(launcher)
    text = log.read_text(errors="replace")
    numbers = {"command": check.command, "log": str(log)}
    last = ([line.strip(" =") for line in text.splitlines() if line.strip(" =")] or [""])[-1][:_MOST_LETTERS]
    if result != "passed":
        return failed(f"{result}: {last}", f"read {log}; see CONTRIBUTING.md for what the test shows", numbers)
    if "pytest" in check.command and not _PASSED.search(last):
        return not_applicable(f"its tests do not run here: {last}", numbers)
    return passed(last, numbers)


def _list_of(group: str) -> ModuleType | None:
    """The module with a group's list; None outside a clone."""
    name = LISTS[group][0]
    if not (REPOSITORY / "tests" / f"{name.replace('.', '/')}.py").is_file():
        return None
    sys.path.insert(0, str(REPOSITORY))
    try:
        return importlib.import_module(f"tests.{name}")
    finally:
        sys.path.remove(str(REPOSITORY))
