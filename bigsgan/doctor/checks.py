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
    """The processes that examine together.

    Attributes:
        rank: Of this process.
        size: Number of ranks.
        hosts: Of each rank.
    """

    rank: int
    size: int
    hosts: Sequence[str]

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' picklable values, by rank, on every rank. All ranks call it, and none raises before."""
        ...


@dataclass(frozen=True)
class Subject:
    """What is examined.

    Attributes:
        ranks: That examine it.
        local_rank: Of this process on its host.
        local_size: Number of ranks on this host.
        plan: Of ``--config``.
        run: Directory of ``--run``.
        out: Where checkpoints are written: that run, the recipe's ``out``, or the working directory.
    """

    ranks: Ranks
    local_rank: int = 0
    local_size: int = 1
    plan: RunPlan | None = None
    run: Path | None = None
    out: Path = Path()

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
    """One rank's answer.

    Attributes:
        status: "pass", "fail" or "not applicable".
        said: What was found, as one short line; it stands in the table.
        numbers: By name, for ``--json``: numbers, texts, lists of them.
        remedy: What to do about a fail, as imperative sentences.
        severity: Of several ranks' answers with one status, the largest is shown.
        raised: Whether the check ended by an exception.
        of_all: Whether it is about what the ranks did together, so that none of them is to blame.
    """

    status: Status
    said: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    remedy: str = ""
    severity: float = 0.0
    raised: bool = False
    of_all: bool = False


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
    """One line of the doctor's list.

    Attributes:
        name: ``<group>.<name>``; ``--only`` takes either.
        proves: What a pass shows, as a sentence without an end.
        seconds: About how long it takes.
        run: ``<module>:<function>`` in bigsgan/doctor: takes a Subject and ``words``, returns a Finding, and runs on
            every rank.
        needs: What it needs; where that lacks, it is not applicable.
        words: Given to the function behind the subject.
    """

    name: str
    proves: str
    seconds: float
    run: str
    needs: tuple[Need, ...] = ()
    words: tuple[str, ...] = ()

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
