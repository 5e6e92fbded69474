"""Checks that fail on purpose, and a doctor that runs them: `python -m tests.planted FAULT RANK ...`."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from bigsgan import cli
from bigsgan.doctor import checks, examine, registry
from bigsgan.doctor.checks import Check, Finding, Subject, failed, not_applicable, passed

FAULTY = 1
"""The rank on which a fault shows."""


def good(subject: Subject) -> Finding:
    return passed("all is well", {"rank": subject.ranks.rank}, subject.ranks.rank)


def fails(subject: Subject) -> Finding:
    if subject.ranks.rank != FAULTY:
        return passed("all is well", severity=10.0)
    return failed("it is broken", "mend it", {"number": 5})


def is_not_for_some(subject: Subject) -> Finding:
    return passed("all is well") if subject.ranks.rank == FAULTY else not_applicable("nothing here")


def raises(subject: Subject) -> Finding:
    if subject.ranks.rank == FAULTY:
        raise ValueError("a planted\nerror")
    return passed("all is well")


def raises_before_a_gather(subject: Subject) -> Finding:
    raises(subject)
    return passed(f"gathered {subject.ranks.gather(1)}")


def raises_before_a_collective(subject: Subject) -> Finding:
    raises(subject)
    dist.all_reduce(torch.zeros(1))
    return passed("all is well")


def collective(subject: Subject) -> Finding:
    value = torch.full((), subject.ranks.rank + 1.0)
    dist.all_reduce(value)
    return passed("added", {"sum": float(value), "gathered": subject.ranks.gather(subject.ranks.rank)})


def dies(subject: Subject) -> Finding:
    if subject.ranks.rank == FAULTY:
        os._exit(77)
    return passed(f"gathered {subject.ranks.gather(1)}")


def hangs(subject: Subject) -> Finding:
    if subject.ranks.rank == FAULTY:
        time.sleep(1000)
    return passed("all is well")


NAMES = (
    "good", "fails", "is_not_for_some", "raises", "raises_before_a_gather", "raises_before_a_collective",
    "collective", "dies", "hangs",
)  # fmt: skip
PLANTED = SimpleNamespace(**{name: globals()[name] for name in NAMES})


def plant(names: list[str], faulty: int = 1, patience: float = 5.0) -> list[Check]:
    """The checks of these names, for this process's doctor."""
    global FAULTY
    FAULTY = faulty
    checks.PATIENCE_SECONDS = patience
    sys.modules["bigsgan.doctor.planted"] = PLANTED  # type: ignore[assignment]
    groups = {"collective", "raises_before_a_collective"}
    return [
        Check(f"planted.{name}", "a test", 0, f"planted:{name}", ("group",) if name in groups else ()) for name in names
    ]


if __name__ == "__main__":
    examine.GROUP_SECONDS = 5.0
    patience = 20.0 if "raises_before_a_collective" in sys.argv else 5.0  # for gloo to give up before
    registry.CHECKS = tuple(plant(sys.argv[2:], int(sys.argv[1]), patience))
    sys.exit(cli.main(["doctor"]))
