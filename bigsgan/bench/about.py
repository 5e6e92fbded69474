"""Where a measurement was made: device, versions, ranks, and the command that makes it again."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bigsgan import comm


def about() -> dict[str, Any]:
    """What a result says of itself."""
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


def describe(facts: dict[str, Any]) -> list[str]:
    """The same as lines of text."""
    cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''} of {facts['threads']} threads"
    versions = f"torch {facts['torch']}, deepspeed {facts['deepspeed']}{cuda}"
    return [f"{facts['device']}; {ranks}; {versions}", f"command: {facts['command']}"]


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(comm.device())
    model = platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"CPU ({model}, {len(os.sched_getaffinity(0))} cores)"
