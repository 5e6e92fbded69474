"""Signals and hanging ranks under the real launchers: a run saves and ends, or names the culprit."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from bigsgan import checkpoint
from tests.distributed import launching
from tests.distributed.launching import TIMEOUT, launch, rank_processes, started
from tests.tiny import tiny_recipe

RUN = ["--config", "tiny.yaml", "out=run", "report_nimg=8"]
two_devices = launching.needs_two_devices


@pytest.mark.slow
@two_devices
@pytest.mark.parametrize(
    "launcher, target, number",
    [
        ("torchrun", "launcher", signal.SIGTERM),
        ("deepspeed", "rank 0", signal.SIGUSR1),
        ("deepspeed", "launcher", signal.SIGTERM),
    ],
    ids=str,
)
def test_a_signal_saves_and_ends_all_ranks(launcher, target, number, tmp_path):
    tiny_recipe(tmp_path)
    with started(launcher, tmp_path, *RUN) as process:
        ranks = rank_processes(process, tmp_path / "run")
        goal = process if target == "launcher" else ranks[int(target[-1])]
        goal.send_signal(number)
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() for rank in ranks)
        output, _ = process.communicate(timeout=TIMEOUT)
    found = checkpoint.find_intact(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found.nimg == rows[-1]["nimg"]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text()
    assert "Traceback" not in log
    if target != "launcher":  # which passes nothing on afterwards
        assert f"stopped by {number.name} at {found.nimg} images, which are saved; the same command goes on" in output
        assert process.returncode == 0


@pytest.mark.nightly  # as the test on Slurm
@two_devices
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    for name in ("stopped", "whole"):
        (tmp_path / name).mkdir()
        tiny_recipe(tmp_path / name)
    with started("torchrun", tmp_path / "stopped", *RUN) as process:
        rank_processes(process, tmp_path / "stopped" / "run")[1].send_signal(signal.SIGUSR1)
        process.communicate(timeout=TIMEOUT)
    total = checkpoint.find(tmp_path / "stopped" / "run").nimg + 24
    states = []
    for name in ("stopped", "whole"):
        assert launch("torchrun", tmp_path / name, *RUN, f"total_nimg={total}").returncode == 0
        found = checkpoint.find(tmp_path / name / "run")
        assert found.nimg == total
        states.append(found.manifest["files"])
    assert states[0] == states[1]  # checksums of all tensors


@pytest.mark.slow
@two_devices
def test_a_rank_that_hangs_is_named_and_ends_the_job(tmp_path):
    tiny_recipe(tmp_path)
    with started("deepspeed", tmp_path, *RUN, "hang_timeout_seconds=6") as process:
        ranks = rank_processes(process, tmp_path / "run")
        ranks[1].send_signal(signal.SIGSTOP)
        hung = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT)
        assert time.monotonic() - hung < 90
        _, alive = psutil.wait_procs(ranks, timeout=5)
    assert process.returncode != 0
    assert not alive
    (line,) = [line for line in output.splitlines() if "bigsgan: " in line]
    assert "bigsgan: nothing has happened for 6 s: rank 1 does not answer, last seen in phase 'update " in line
    assert 'File "' in (tmp_path / "run" / "logs" / "rank00000.log").read_text()  # the stacks
