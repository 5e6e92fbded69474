"""The list of checks, in the order in which they run: what needs only the host comes first."""

from __future__ import annotations

from collections.abc import Sequence

from bigsgan.doctor.checks import Check
from bigsgan.errors import UserError

CHECKS = (
    Check("environment.versions", "Python, torch, deepspeed and the driver are supported", 1, "versions:versions"),
    Check("environment.locks", "no killed build blocks the compilation of ops", 1, "builds:stale_locks"),
    Check("environment.files", "enough files can be open at once", 0.1, "host:open_files"),
)


def chosen(only: Sequence[str], examines_run: bool) -> list[Check]:
    """Checks that a command line asks for.

    Args:
        only: Names of checks or groups of them; none asks for all of a run's health or all the others.
        examines_run: Whether ``--run`` is given.

    Raises:
        UserError: A name stands for no check.
    """
    for word in only:
        if not any(_stands_for(word, check) for check in CHECKS):
            problem = "must be the name of a check, or the part before its point"
            raise UserError("--only", word, problem, "see `bigsgan doctor --list`")
    if only:
        return [check for check in CHECKS if any(_stands_for(word, check) for word in only)]
    return [check for check in CHECKS if ("run" in check.needs) == examines_run]


def _stands_for(word: str, check: Check) -> bool:
    return check.name == word or check.name.startswith(f"{word}.")
