"""Faults of one side where G and D have ranks of their own, under a real launcher: who is named, and what resumes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from bigsgan import checkpoint
from tests.distributed import launching
from tests.distributed.launching import TIMEOUT, launch, rank_processes, started
from tests.tiny import tiny_recipe

pytestmark = launching.needs_two_devices

HELD = ("generator", "discriminator")
"""By rank."""

SPLIT = ["engines.generator.ranks=1"]
RUN = ["--config", "tiny.yaml", "out=run", "report_nimg=8", "checkpoint_nimg=8"]
NIGHTLY, SLOW = pytest.mark.nightly, pytest.mark.slow


def messages(output: str) -> list[str]:
    return [line.partition("bigsgan: ")[2] for line in output.splitlines() if "bigsgan: " in line]


def saving_ranks(process: subprocess.Popen[str], run: Path) -> list[psutil.Process]:
    """The ranks by rank, once there is a checkpoint."""
    ranks = rank_processes(process, run)
    while not any(path.name.isdecimal() for path in (run / "checkpoints").glob("*")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    return ranks


def resumes(directory: Path, *more: str) -> None:
    """The run resumes, for three updates, from the checkpoint that there is."""
    nimg = checkpoint.find_intact(directory / "run").nimg
    assert nimg > 0
    result = launch("torchrun", directory, *RUN, *more, f"total_nimg={nimg + 24}")
    assert result.returncode == 0, result.stdout
    assert f"Resuming from run/checkpoints/{nimg:012d} ({nimg} images)" in result.stdout
    assert json.loads((directory / "run" / "metrics.jsonl").read_text().splitlines()[-1])["nimg"] == nimg + 24


@pytest.mark.parametrize(
    "victim, goes_on",
    [pytest.param(1, False, marks=SLOW), pytest.param(0, True, marks=NIGHTLY), pytest.param(1, True, marks=NIGHTLY)],
)
def test_a_killed_rank_is_named_with_its_network_and_the_run_resumes_on_ranks_that_hold_both(victim, goes_on, tmp_path):
    tiny_recipe(tmp_path)
    with started("deepspeed", tmp_path, *RUN, *SPLIT) as process:
        ranks = saving_ranks(process, tmp_path / "run")
        ranks[victim].kill()
        killed = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert time.monotonic() - killed < 60
        assert process.returncode != 0
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive
    (line,) = messages(output)
    other = f"rank {1 - victim} ({HELD[1 - victim]})"
    gone = rf"rank {victim} \({HELD[victim]}\) on \S+ \(process {ranks[victim].pid}\) ended without a message"
    lost = f"; {re.escape(other)} on .* lost its connection in phase '.*"  # unless its watchdog sees the end first
    assert re.fullmatch(f"{gone}: killed, or crashed({lost})?", line), line
    if goes_on:
        resumes(tmp_path)


@pytest.mark.parametrize("victim", [pytest.param(rank, marks=NIGHTLY) for rank in (0, 1)])
def test_a_rank_that_hangs_is_named_with_who_waits_for_it(victim, tmp_path):
    """Under torchrun, whose own process keeps the store; rank 0 does so elsewhere."""
    tiny_recipe(tmp_path)
    with started("torchrun", tmp_path, *RUN, *SPLIT, "hang_timeout_seconds=6") as process:
        ranks = saving_ranks(process, tmp_path / "run")
        ranks[victim].send_signal(signal.SIGSTOP)
        output, _ = process.communicate(timeout=TIMEOUT)  # torchrun gives the stopped rank half a minute
        psutil.wait_procs(ranks, timeout=5)
    assert process.returncode != 0
    (line,) = [line for line in messages(output) if "no progress" in line]
    assert (
        f"no progress for 6 s: rank {victim} ({HELD[victim]}) does not answer, last seen in phase '" in line
    )  # a moment before
    # It was seen a moment before, and may have stopped between two updates, where all ranks wait for all.
    stack = (tmp_path / "run" / "logs" / f"rank{1 - victim:05d}.log").read_text().partition("ending this rank: ")[2]
    waits = f"; rank {1 - victim} ({HELD[1 - victim]}) waits for it in '{('G makes images', 'D judges')[victim]}'"
    assert (waits in line) == bool(re.search(r'exchange\.py", line \d+ in receive', stack)), line
    resumes(tmp_path, *SPLIT)
