"""Defines a check, what it is given, and its result. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from bigsgan.config import RunPlan

Status = Literal["pass", "fail", "not applicable"]
Need = Literal["config", "run", "ranks", "gpu", "group", "only"]

NEEDS: dict[Need, str] = {
    "config": "--config",
    "run": "--run",
    "ranks": "several ranks",
    "gpu": "a GPU",
    "group": "the ranks' connection",
    "only": "its name after --only",
}
"""What a check may need, in words. The connection is made when a check needs it, also for one rank.

A check with "only" takes minutes: naming its group does not run it, unless all checks of the group have "only".
"""


class Ranks(Protocol):
    """The processes that run the checks together. All but ``gather`` is for the doctor itself; ``Job`` documents it."""

    rank: int  # rank of this process
    size: int  # number of ranks
    hosts: Sequence[str]  # host of each rank

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' picklable values, by rank, on every rank. All ranks must call it; none may raise before."""

    def check(self, name: str, patience: float) -> AbstractContextManager[None]:
        """Begin a check."""

    def collect(self, value: Any) -> list[tuple[int, Any]] | None:
        """End a check with this rank's value."""

    def share(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""

    def leave(self) -> None:
        """Disconnect from the other ranks."""

    def is_lost(self, error: Exception) -> bool:
        """Whether an error means that the ranks can no longer exchange values."""


@dataclass(frozen=True)
class Subject:
    """What the checks examine."""

    ranks: Ranks
    local_rank: int = 0  # rank of this process on its host
    plan: RunPlan | None = None  # plan of the recipe given by `--config`
    run: Path | None = None  # run directory given by `--run`
    out: Path = Path()  # where checkpoints are written: that run, the recipe's `out`, or the working directory

    def recipe_plan(self) -> RunPlan:
        """The plan, for checks that need ``config``."""
        assert self.plan is not None
        return self.plan

    def run_directory(self) -> Path:
        """The run directory, for checks that need ``run``."""
        assert self.run is not None
        return self.run

    def same_host(self) -> list[int]:
        """Ranks on this rank's host."""
        own = self.ranks.hosts[self.ranks.rank]
        return [rank for rank, host in enumerate(self.ranks.hosts) if host == own]


@dataclass(frozen=True)
class Finding:
    """One rank's result of a check."""

    status: Status
    said: str  # what was found, as one short line for the table
    numbers: Mapping[str, Any] = field(default_factory=dict)  # by name, for `--json`: numbers, texts, lists of them
    remedy: str = ""  # what to do about a fail, as imperative sentences
    severity: float = 0.0  # of several ranks' results with one status, the largest is shown
    raised: bool = False  # whether the check ended by an exception
    of_all: bool = False  # whether it is about what the ranks did together, so that no single rank is to blame


def passed(said: str, numbers: Mapping[str, Any] | None = None, severity: float = 0.0) -> Finding:
    """Return the result of a check that found no fault."""
    return Finding("pass", said, numbers or {}, severity=severity)


def failed(said: str, remedy: str, numbers: Mapping[str, Any] | None = None, severity: float = 0.0) -> Finding:
    """Return the result of a check that found a fault, for which ``remedy`` says what to do."""
    return Finding("fail", said, numbers or {}, remedy, severity)


def not_applicable(said: str, numbers: Mapping[str, Any] | None = None) -> Finding:
    """Return the result of a check that has nothing to check here."""
    return Finding("not applicable", said, numbers or {})


def first_of(bad: Sequence[str], num: int) -> str:
    """The first of the names that are bad, and how many of the others are, of ``num`` in all."""
    return f"{bad[0]} (and {len(bad) - 1} of {num - 1} others)" if len(bad) > 1 else bad[0]


def judged(
    what: str, errors: dict[str, float], bounds: dict[str, float], unit: str, remedy: str, whole: str | None = None
) -> Finding:
    """Return whether errors are within their bounds: ``what`` is so many of a ``unit``, or ``whole`` in a pass."""
    numbers = {name: {"difference": error, "bound": bounds[name]} for name, error in errors.items()}
    bad = [name for name, error in errors.items() if not error <= bounds[name]]
    if bad:
        error, bound = errors[bad[0]], bounds[bad[0]]
        text = f"{first_of(bad, len(errors))}: {what} {error:.1e} {unit}, over {bound:.0e}"
        return failed(text, remedy, numbers, error)
    worst = max(errors, key=lambda name: errors[name] / (bounds[name] or 1e-30))
    return passed(f"{whole or what} at most {errors[worst]:.1e} {unit}, of {bounds[worst]:.0e}: {worst}", numbers)


@dataclass(frozen=True)
class Check:
    """One line of the doctor's list."""

    name: str  # `<group>.<name>`; `--only` takes either
    proves: str  # what a pass shows, as a sentence without an end
    seconds: float  # approximate duration
    # `<module>:<function>` in bigsgan/doctor: takes a Subject and `words`, returns a Finding, and runs on every rank
    run: str
    needs: tuple[Need, ...] = ()  # if one of these is missing, the check is not applicable
    words: tuple[str, ...] = ()  # further arguments of the function

    @property
    def group(self) -> str:
        """The part of its name before the point."""
        return self.name.partition(".")[0]

    @property
    def needed(self) -> str:
        """What it needs, in words, without the connection."""
        return ", ".join(NEEDS[need] for need in self.needs if need != "group")

    @property
    def patience(self) -> float:
        """Seconds after which a rank without an answer counts as hung."""
        return PATIENCE_SECONDS + 4 * self.seconds


@dataclass(frozen=True)
class Result:
    """What all ranks found in one check."""

    check: Check
    finding: Finding  # the worst of all ranks
    rank: int  # rank that found it
    findings: list[Finding]  # of all ranks, by rank
    seconds: float  # time of the slowest rank


PATIENCE_SECONDS = 75.0
"""Longer than ``GROUP_SECONDS``, so that a collective times out first."""

GROUP_SECONDS = 60.0
"""How long a collective of a check waits for the other ranks."""
