"""What reports depend on besides the networks: a resumed run makes the same as one that was not stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bigsgan.checkpoint import SavedValues, StateShard
from bigsgan.monitor import Statistics
from bigsgan.runtime import comm
from bigsgan.training.alarms import Alarms

REPORTS = "reports"
"""Name of the entry."""

_SUMS = "sums_of_ranks."
"""Beginning of the kind of the ranks' sums; their number follows."""

_SUM, _ALARMS, _LAST, _DIVERSITY, _OWED = "sum.", "alarms.", "last.", "diversity", "owed"


def owes_metrics(numbers: Mapping[str, float]) -> bool:
    """Whether a saved entry says that quality metrics of its state are due."""
    return bool(numbers.get(_OWED))


class Report(NamedTuple):
    """What a run reports of the state after ``nimg`` images."""

    nimg: int
    metrics: Mapping[str, float]  # by the names of metrics.jsonl; quality metrics if they were measured here


@dataclass
class Reports:
    """The statistics since the last report, and what was reported. A named entry of a run's state."""

    statistics: Statistics
    alarms: Alarms = field(default_factory=Alarms)
    last: Mapping[str, float] = field(default_factory=dict)  # the last report
    measured: tuple[int, Mapping[str, float]] = (-1, {})  # the last quality metrics, and the images seen
    owed: bool = False  # whether quality metrics of this state are due, as a stop came before them or one failed
    diversity: float | None = None  # diversity of the EMA's last samples, on rank 0; see alarms.diversity

    def metrics_at(self, nimg: int) -> dict[str, float]:
        """Return the metrics of the last report, and quality metrics if they were measured at ``nimg`` images."""
        measured_nimg, measured = self.measured
        return {**self.last, **(measured if measured_nimg == nimg else {})}

    @contextmanager
    def counting(self, due: bool) -> Iterator[None]:
        """Let what is reported inside the block count for later reports if it is due, as a run's last may not be."""
        if due:
            yield
            return
        names, sums = self.statistics.names, self.statistics.held()
        alarms, diversity = deepcopy(self.alarms), self.diversity
        yield
        self.statistics.clear()
        self.statistics.hold(names, sums)
        self.alarms, self.diversity = alarms, diversity

    def parts(self) -> list[StateShard]:
        """Return this rank's sums, as bytes: they may be infinite."""
        if not self.statistics.names:
            return []
        sums = self.statistics.held()
        return [StateShard(f"{_SUMS}{comm.world_size()}", _of(comm.rank()), 0, sums.view(torch.uint8))]

    def numbers(self) -> dict[str, float]:
        """Return everything else; on other ranks than 0 without the diversity."""
        found: dict[str, float] = {f"{_SUM}{name}": place for place, name in enumerate(self.statistics.names)}
        found |= {f"{_ALARMS}{name}": number for name, number in self.alarms.numbers().items()}
        found |= {f"{_LAST}{name}": float(number) for name, number in self.last.items()}
        found |= {} if self.diversity is None else {_DIVERSITY: self.diversity}
        return found | {_OWED: int(self.owed)}

    def load(self, saved: SavedValues) -> None:
        """Restore everything. Of other ranks than these, rank 0 takes all sums."""
        self.forget()
        numbers, rank = saved.numbers, comm.rank()
        self.alarms.load(_those(numbers, _ALARMS))
        self.last = _those(numbers, _LAST)
        self.owed = owes_metrics(numbers)
        self.diversity = numbers.get(_DIVERSITY) if rank == 0 else None
        names = list(_those(numbers, _SUM))
        for kind in saved.kinds if names else ():
            num = int(re.sub(r"\D", "", kind))
            ranks = [rank] if num == comm.world_size() else range(num if rank == 0 else 0)
            if num != comm.world_size():  # others may not have added to all of them when they are reduced
                self.statistics.declare(*names)
            for each in ranks:
                sums = self.statistics.empty(len(names))
                saved.read(kind, _of(each), 0, sums.view(torch.uint8))
                self.statistics.hold(names, sums)

    def forget(self) -> None:
        """Begin anew: an older version's checkpoint does not have this entry."""
        self.statistics.clear()
        self.alarms, self.last, self.owed, self.diversity = Alarms(), {}, False, None


def _of(rank: int) -> str:
    return f"rank{rank:05d}"


def _those(numbers: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): number for name, number in numbers.items() if name.startswith(prefix)}
