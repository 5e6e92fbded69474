"""Runs the commands of `bigsgan bench` on all ranks, and prints their results with machine and versions."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any, TypeVar

import torch

from bigsgan.bench.host import processor
from bigsgan.bench.table import Table, as_json, shown
from bigsgan.errors import counted
from bigsgan.runtime import comm
from bigsgan.runtime.ending import exit_status

T = TypeVar("T")


def on_all_ranks(measure: Callable[[], T], show: Callable[[T], None]) -> int:
    """Measure, show the result on rank 0, and return the exit status. Every rank calls this."""

    def work() -> int:
        with redirect_stdout(sys.stderr):  # only the results go to standard output
            comm.initialize(comm.PATIENCE_HOURS * 3600)
            found = measure()
        if comm.rank() == 0:
            show(found)
        comm.leave()
        return 0

    return exit_status(work)


def print_results(form: str | None, record: Mapping[str, Any], *tables: Table) -> None:
    """Print results, machine and versions: a record as ``json``, or its tables as ``markdown`` or for a terminal."""
    facts = about()
    if form == "json":
        print(as_json({**facts, **record}))
        return
    cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    ranks = f"{counted(facts['ranks'], 'rank')} of {facts['threads']} threads"
    versions = f"torch {facts['torch']}, deepspeed {facts['deepspeed']}{cuda}"
    tables[-1].notes += [f"{facts['device']}; {ranks}; {versions}", f"command: {facts['command']}"]
    print("\n\n".join(shown(table, form == "markdown") for table in tables))


def about() -> dict[str, Any]:
    """Facts about this process that results are printed with."""
    return {
        "command": shlex.join(["bigsgan", *sys.argv[1:]]),
        "device": _device_name(),
        "ranks": comm.world_size(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "deepspeed": version("deepspeed"),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(comm.device())
    return f"CPU ({processor() or platform.machine()}, {counted(len(os.sched_getaffinity(0)), 'core')})"
