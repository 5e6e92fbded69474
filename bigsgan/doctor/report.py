"""The doctor's report: a table printed line by line, or JSON. No torch here."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any, TextIO

from bigsgan.doctor.checks import Check, Ranks, Result
from bigsgan.errors import counted
from bigsgan.preflight import versions
from bigsgan.table import aligned, finite

_SHORT = {"pass": "pass", "fail": "FAIL", "not applicable": "n/a"}


class Report:
    """Prints results: a table, line by line, or at the end all of them as JSON."""

    def __init__(self, as_json: bool, file: TextIO, command: Sequence[str]) -> None:
        """Begin without results.

        Args:
            as_json: Whether to print JSON, while the table's lines go to standard error.
            file: File to print to.
            command: Runs the doctor again, without the choice of checks.
        """
        self._as_json, self._file, self._command = as_json, file, command
        self._lines = sys.stderr if as_json else file
        self._about: dict[str, Any] = {}
        self._width = 0
        self._results: list[Result] = []

    def begin(self, ranks: Ranks, checks: Sequence[Check]) -> None:
        """Print the line of ``describe``, and the headings."""
        self._about, self._width = about(ranks), max(len(check.name) for check in checks)
        self._print_line(describe(self._about))
        self._print_line(f"\n{'check':{self._width}}  result  seconds  found")

    def start(self, check: Check) -> None:
        """Name the check that runs, on a terminal; its result takes that line."""
        if self._lines.isatty():
            print(f"{check.name} ...", end="\r", file=self._lines, flush=True)

    def add(self, result: Result) -> None:
        """Print a result; below a fail, its remedy and the command that repeats it."""
        self._results.append(result)
        head = f"{result.check.name:{self._width}}  {_SHORT[result.finding.status]:6}  {result.seconds:7.1f}"
        self._print_line(f"{head}  {result.finding.said}")
        if result.finding.status == "fail":
            indent = " " * (self._width + 19)
            self._print_line(f"{indent}remedy: {result.finding.remedy}")
            where = ", by the same launcher" if self._about["ranks"] > 1 else ""
            self._print_line(f"{indent}again{where}: {rerun_command(self._command, result)}")

    def end(self) -> None:
        """Print all results, or below the table the number of checks by status."""
        text = self._json() if self._as_json else f"\n{tally(self._results)}"
        print(text, file=self._file, flush=True)

    def _print_line(self, text: str) -> None:
        print(text, file=self._lines, flush=True)

    def _json(self) -> str:
        checks = [as_record(result, rerun_command(self._command, result)) for result in self._results]
        record = {**self._about, "failed": [c["name"] for c in checks if c["status"] == "fail"], "checks": checks}
        return json.dumps(finite(record), indent=2, allow_nan=False, default=str)


def as_record(result: Result, command: str) -> dict[str, Any]:
    """A result as a record with all numbers of all ranks."""
    ranks = [
        {"rank": rank, "status": each.status, "said": each.said, "numbers": dict(each.numbers)}
        for rank, each in enumerate(result.findings)
    ]
    return {
        "name": result.check.name,
        "proves": result.check.proves,
        "status": result.finding.status,
        "said": result.finding.said,
        "rank": result.rank,
        "remedy": result.finding.remedy,
        "command": command,
        "seconds": result.seconds,
        "ranks": ranks,
    }


def listed(checks: Sequence[Check]) -> str:
    """A table of checks, for ``--list``."""
    rows = [["check", "shows", "needs", "seconds"]]
    for check in checks:
        rows.append([check.name, check.proves, check.needed, f"{check.seconds:g}"])
    return "\n".join(aligned(rows, num_texts=3))


def about(ranks: Ranks) -> dict[str, Any]:
    """Facts about the date, hosts, ranks and packages."""
    return {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "hosts": sorted(set(ranks.hosts)),
        "host_of_rank": list(ranks.hosts),
        "ranks": ranks.size,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions(),
    }


def describe(facts: dict[str, Any]) -> str:
    """``about`` as a line."""
    num_hosts, ranks = len(facts["hosts"]), facts["ranks"]
    where = facts["hosts"][0] if num_hosts == 1 else f"{num_hosts} hosts"
    packages = ", ".join(f"{name} {facts.get(name, 'not installed')}" for name in ("bigsgan", "torch", "deepspeed"))
    return f"{facts['date']}: {where}, {counted(ranks, 'rank')}, {packages}, Python {facts['python']}"


def tally(results: Sequence[Result]) -> str:
    """The number of checks by status, in words."""
    counts = Counter(result.finding.status for result in results)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['not applicable']} not applicable"


def rerun_command(command: Sequence[str], result: Result) -> str:
    """The command that runs a check alone."""
    return shlex.join([*command, "--only", result.check.name])
