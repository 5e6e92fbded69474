"""Checks of the doctor, called alone: on one rank, or on several that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bigsgan.doctor.checks import Finding, Subject

LATE = 60.0


class Threads:
    """Ranks that are threads."""

    def __init__(self, rank: int, hosts: Sequence[str], values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self._values, self._barrier = values, barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(LATE)
        found = list(self._values)
        self._barrier.wait(LATE)
        return found


def examined(
    check: Callable[[Subject], Finding],
    hosts: Sequence[str] = ("a",),
    by_rank: Sequence[dict[str, Any]] = (),
    **same: Any,
) -> list[Finding]:
    """What each rank finds; ``by_rank`` and ``same`` are fields of their subjects."""
    values, barrier = [None] * len(hosts), threading.Barrier(len(hosts))

    def run(rank: int) -> Finding:
        ranks = Threads(rank, hosts, values, barrier)
        own = by_rank[rank] if by_rank else {}
        return check(Subject(ranks, **{"local_size": list(hosts).count(hosts[rank]), **same, **own}))

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(run, range(len(hosts))))


def alone(check: Callable[[Subject], Finding], **fields: Any) -> Finding:
    """What one rank finds."""
    (finding,) = examined(check, **fields)
    return finding
