"""Runs checks on all ranks, one after the other, and reports what they found."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bigsgan.config import RunPlan
from bigsgan.doctor.checks import GROUP_SECONDS, NEEDS, Check, Finding, Need, Ranks, Result, Subject, not_applicable
from bigsgan.doctor.report import Report
from bigsgan.doctor.single_process import SingleProcess
from bigsgan.errors import EXIT_FAILED, UserError, counted, end_process
from bigsgan.runtime import launched

_LONGEST = 400
_log = logging.getLogger(__name__)


@dataclass
class Examiner:
    """Runs checks, on every rank."""

    subject: Subject
    report: Report  # shows results, on rank 0
    _is_connected: bool = False
    _parted_by: str = ""  # check in which a rank raised: others may wait for it in a collective, or have no connection

    def examine(self, checks: Sequence[Check]) -> bool:
        """Run checks, and return whether none failed."""
        ranks = self.subject.ranks
        if ranks.rank == 0:
            self.report.begin(ranks, checks)
        is_well = True
        for check in checks:
            if ranks.rank == 0:
                self.report.start(check)
            with ranks.check(check.name, check.patience):
                start = time.monotonic()
                finding = self._find(check)
                found = ranks.collect((finding, time.monotonic() - start))
                status, parted = ranks.share(self._conclude(check, found) if found else None)
            is_well &= status != "fail"
            if parted:
                self._parted_by = check.name
        if ranks.rank == 0:
            self.report.end()
        return is_well

    def _find(self, check: Check) -> Finding:
        """Run a check on this rank."""
        try:
            lacking = self._lacking(check.needs)
            if lacking:
                return not_applicable(lacking)
            module, _, function = check.run.partition(":")
            examine = getattr(importlib.import_module(f"bigsgan.doctor.{module}"), function)
            found: Finding = examine(self.subject, *check.words)
            return found
        except Exception as error:
            if self.subject.ranks.is_lost(error):
                raise
            _log.info("check %s raised", check.name, exc_info=True)
            if isinstance(error, UserError):
                return Finding("fail", error.said[:_LONGEST], remedy=error.remedy, raised=True)
            said = " ".join(f"{type(error).__name__}: {error}".split())
            remedy = "run the command below for this check alone, and look at the messages of the library that it names"
            return Finding("fail", said[:_LONGEST], remedy=remedy, raised=True)

    def _lacking(self, needs: Sequence[Need]) -> str:
        """Return why a check is not applicable on this rank, or an empty text."""
        present = {
            "config": self.subject.plan is not None,
            "run": self.subject.run is not None,
            "ranks": self.subject.ranks.size > 1,
        }
        for need in needs:
            if not present.get(need, True):
                return f"needs {NEEDS[need]}"
        if "gpu" in needs and not _is_on_gpu():
            return f"needs {NEEDS['gpu']}"
        if "group" in needs:
            if self._parted_by:
                return f"the ranks have no connection since {self._parted_by}"
            if not self._is_connected:
                self._connect()
        return ""

    def _connect(self) -> None:
        """Make torch's process group, which checks with "group" need."""
        importlib.import_module("bigsgan.runtime.comm").initialize(GROUP_SECONDS)
        self._is_connected = True

    def _conclude(self, check: Check, found: Sequence[tuple[int, tuple[Finding, float]]]) -> tuple[str, bool]:
        """Show the worst finding of all ranks; return its status, and whether the check parted the ranks."""
        ranks, order = self.subject.ranks, ("not applicable", "pass", "fail")
        status = max((finding.status for _, (finding, _) in found), key=order.index)
        having = [(rank, finding) for rank, (finding, _) in found if finding.status == status]
        raised = [(rank, finding) for rank, finding in having if finding.raised]
        if raised:  # the first to raise is shown: others may have failed because of it
            rank, worst = raised[0]
        else:
            rank, worst = max(sorted(having, key=lambda each: each[0]), key=lambda each: each[1].severity)
        others = len(having) - 1
        if ranks.size > 1 and status == "fail" and not worst.of_all:
            more = f" (and {counted(others, 'more rank')})" if others else ""
            worst = replace(worst, said=f"rank {rank} on {ranks.hosts[rank]}{more}: {worst.said}")
        by_rank = {rank: finding for rank, (finding, _) in found}
        seconds = max(seconds for _, (_, seconds) in found)
        self.report.add(Result(check, worst, rank, [by_rank[rank] for rank in range(ranks.size)], seconds))
        return status, bool(raised) and "group" in check.needs and ranks.size > 1


def _is_on_gpu() -> bool:
    """Whether runs compute on a GPU: one is there, and DS_ACCELERATOR does not choose the CPU."""
    if not importlib.import_module("torch").cuda.is_available():
        return False
    return str(importlib.import_module("bigsgan.runtime.comm").device().type) == "cuda"


def main(checks: Sequence[Check], plan: RunPlan | None, run: Path | None, report: Report) -> int:
    """Run checks, print the results on rank 0, and return the exit status: 0, or 1 if a check failed."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the doctor reports a lost store itself, without stacks
    size = launched.world_size()
    ranks: Ranks = importlib.import_module("bigsgan.doctor.ranks").meet() if size > 1 else SingleProcess()
    out = run or (Path(plan.recipe.out) if plan else Path())
    subject = Subject(ranks, launched.number("LOCAL_RANK", default=0, least=0), plan, run, out)
    with contextlib.redirect_stdout(sys.stderr):  # for what libraries print; the report has kept standard output
        is_well = Examiner(subject, report).examine(checks)
    ranks.leave()
    status = 0 if is_well else EXIT_FAILED
    if size > 1:
        end_process(status)  # a group whose ranks have lost each other cannot be destroyed
    return status
