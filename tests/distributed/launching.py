"""Starts the real launchers with two ranks, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from tests import REPOSITORY
from tests.ports import free_port

SCRIPT = str(REPOSITORY / "launch" / "train.py")
STATUS = {"deepspeed": 2, "torchrun": 1}
"""What each launcher makes of our status 2."""

TIMEOUT = 120
"""Below it by far: ranks that wait for one that has ended would sit there for half an hour."""

needs_two_devices = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="deepspeed starts no two ranks on a single GPU"
)


def launch(launcher: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on two ranks to its end."""
    with started(launcher, directory, *arguments) as process:
        output, _ = process.communicate(timeout=TIMEOUT)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


@contextmanager
def started(launcher: str, directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the script on two ranks beside the block; what is left of them at its end is killed."""
    ranks = "--num_gpus" if launcher == "deepspeed" else "--nproc_per_node"
    command = [launcher, ranks, "2", "--master_port", str(free_port()), SCRIPT, *arguments]
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}  # as in a terminal
    with subprocess.Popen(command, cwd=directory, env=env, text=True, **options) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for other in [*psutil.Process(process.pid).children(recursive=True), process]:
                    other.kill()


def rank_processes(process: subprocess.Popen[str], run: Path) -> list[psutil.Process]:
    """The two ranks by rank, once they have reported an update."""
    report = run / "metrics.jsonl"
    while not (report.exists() and report.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in family if SCRIPT in p.cmdline() and "-m" not in p.cmdline()]
    ranks = [p for p in ranks if not p.children()]
    assert len(ranks) == 2
    return sorted(ranks, key=lambda p: int(p.environ()["RANK"]))
