"""What a check is, what it is told, and what it answers. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from bigsgan.config import RunPlan

Status = Literal["pass", "fail", "not applicable"]
Need = Literal["config", "run", "ranks", "hosts", "gpu", "group", "only"]

NEEDS: dict[Need, str] = {
    "config": "--config",
    "run": "--run",
    "ranks": "several ranks",
    "hosts": "several hosts",
    "gpu": "a GPU",
    "group": "the ranks' connection",
    "only": "its name after --only",
}
"""What a check may need, in words. A connection is made where a check asks for it, and one rank has it too.

What needs its name takes minutes: a group does not include it, but for groups of such checks alone.
"""


class Ranks(Protocol):
    """The processes that examine together."""

    rank: int  # of this process
    size: int  # number of ranks
    hosts: Sequence[str]  # of each rank

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' picklable values, by rank, on every rank. All ranks call it, and none raises before."""
        ...


@dataclass(frozen=True)
class Subject:
    """What is examined."""

    ranks: Ranks  # that examine it
    local_rank: int = 0  # of this process on its host
    local_size: int = 1  # number of ranks on this host
    plan: RunPlan | None = None  # of `--config`
    run: Path | None = None  # directory of `--run`
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
    """One rank's answer."""

    status: Status  # "pass", "fail" or "not applicable"
    said: str  # what was found, as one short line; it stands in the table
    numbers: Mapping[str, Any] = field(default_factory=dict)  # by name, for `--json`: numbers, texts, lists of them
    remedy: str = ""  # what to do about a fail, as imperative sentences
    severity: float = 0.0  # of several ranks' answers with one status, the largest is shown
    raised: bool = False  # whether the check ended by an exception
    of_all: bool = False  # whether it is about what the ranks did together, so that none of them is to blame


def passed(said: str, numbers: Mapping[str, Any] = MappingProxyType({}), severity: float = 0.0) -> Finding:
    """All is well."""
    return Finding("pass", said, dict(numbers), severity=severity)


def failed(said: str, remedy: str, numbers: Mapping[str, Any] = MappingProxyType({}), severity: float = 0.0) -> Finding:
    """Something has to be done about it."""
    return Finding("fail", said, dict(numbers), remedy, severity)


def not_applicable(said: str, numbers: Mapping[str, Any] = MappingProxyType({})) -> Finding:
    """There is nothing here to check."""
    return Finding("not applicable", said, dict(numbers))


@dataclass(frozen=True)
class Check:
    """One line of the doctor's list."""

    name: str  # `<group>.<name>`; `--only` takes either
    proves: str  # what a pass shows, as a sentence without an end
    seconds: float  # about how long it takes
    # `<module>:<function>` in bigsgan/doctor: takes a Subject and `words`, returns a Finding, and runs on every rank
    run: str
    needs: tuple[Need, ...] = ()  # what it needs; where that lacks, it is not applicable
    words: tuple[str, ...] = ()  # given to the function behind the subject

    @property
    def group(self) -> str:
        """The part of its name before the point."""
        return self.name.partition(".")[0]

    @property
    def needed(self) -> str:
        """What it needs, in words; the connection goes without saying."""
        return ", ".join(NEEDS[need] for need in self.needs if need != "group")

    @property
    def patience(self) -> float:
        """Seconds after which a rank that has not answered is taken for hung."""
        return PATIENCE_SECONDS + 4 * self.seconds


PATIENCE_SECONDS = 75.0
"""Longer than a collective of a check waits for a rank that does not come."""

GROUP_SECONDS = 60.0
"""How long a collective of a check waits."""
