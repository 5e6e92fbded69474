"""Checks of the doctor, called alone: on one rank, or on several that are threads of this process."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bigsgan.doctor.checks import Check, Finding, Ranks, Result, Subject

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


class Kept:
    """A report that keeps the results."""

    def begin(self, ranks: Ranks, checks: Sequence[Check]) -> None:
        self.results: list[Result] = []

    def start(self, check: Check) -> None:
        pass

    def add(self, result: Result) -> None:
        self.results.append(result)

    def end(self) -> None:
        pass


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
        return check(Subject(ranks, **{**same, **own}))

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(run, range(len(hosts))))


def alone(check: Callable[[Subject], Finding], **fields: Any) -> Finding:
    """What one rank finds."""
    (finding,) = examined(check, **fields)
    return finding


@contextmanager
def small_disk(directory: Path, size: object) -> Iterator[None]:
    """Make a directory that is a file system of its own, of ``size`` bytes; skip the test where that is not allowed."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)
