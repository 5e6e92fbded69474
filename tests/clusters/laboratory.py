"""Runs scripts in a throw-away cluster on this machine: hosts of its own, with a real Slurm or a real ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import REPOSITORY

LAB = Path(__file__).with_name("lab.sh")
TIMEOUT = 540

# Polls, where `sbatch --wait` looks again only after 2, 4, 8, then 10 s.
WAIT = r"""
of_job() { scontrol show job -o "$1" | grep -o " $2=[A-Z_0-9:]*" | tr -d ' '; }
wait_job() { local s; while s=$(of_job $1 JobState); do
  case $s in *PENDING|*RUNNING|*COMPLETING|*CONFIGURING|*REQUEUE*) sleep 0.2;; *) break;; esac; done
  echo "$s $(of_job $1 ExitCode) $(of_job $1 Restarts)"; }
wait_for() { local end=$((SECONDS + 240)); until "$@" 2>/dev/null; do
  [ $SECONDS -lt $end ] || { echo "waited in vain for: $*" >&2; exit 1; }; sleep 0.1; done; }
"""


def need(*services: str) -> None:
    """Skip where the packages are missing; fail there if LAB_REQUIRED is set, as CI sets it."""
    found = subprocess.run(["bash", LAB, "check", *services], capture_output=True, text=True)
    if found.returncode:
        reason = f"no throw-away cluster: {found.stdout.strip()}"
        pytest.fail(reason) if os.environ.get("LAB_REQUIRED") else pytest.skip(reason)


def run(services: str, script: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a bash script on the first host of a new cluster, in ``directory``, with this environment's commands."""
    need(*services.split(","))
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "DS_ACCELERATOR")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env["REPOSITORY"] = str(REPOSITORY)
    command = ["bash", LAB, "run", *options, services, "--", "bash", "-euo", "pipefail", "-c", WAIT + script]
    done = subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
    )
    print(done.stdout, done.stderr)
    return done
