"""Signals and hanging ranks under the real launchers: a run saves and ends, or names the culprit."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bigsgan import checkpoint
from tests.distributed import launching
from tests.distributed.launching import TIMEOUT, rank_processes, started
from tests.tiny import tiny_recipe

RUN = ["--config", "tiny.yaml", "out=run", "report_nimg=8"]
two_devices = launching.needs_two_devices


@pytest.mark.slow
@two_devices
@pytest.mark.parametrize(
    "launcher, target, number",
    [
        ("torchrun", "launcher", signal.SIGTERM),
        pytest.param("deepspeed", "rank 0", signal.SIGUSR1, marks=pytest.mark.nightly),
        pytest.param("deepspeed", "launcher", signal.SIGTERM, marks=pytest.mark.nightly),
        pytest.param("deepspeed", "terminal", signal.SIGINT, marks=pytest.mark.nightly),
        pytest.param("torchrun", "terminal", signal.SIGINT, marks=pytest.mark.nightly),
        ("deepspeed", "terminal", signal.SIGHUP),  # of a connection that breaks
    ],
    ids=str,
)
def test_a_signal_saves_and_ends_all_ranks(launcher, target, number, tmp_path):
    tiny_recipe(tmp_path)
    with started(launcher, tmp_path, *RUN) as process:
        ranks = rank_processes(process, tmp_path / "run")
        if target == "terminal":  # Ctrl-C is sent to all processes
            os.killpg(process.pid, number)
        else:
            (process if target == "launcher" else ranks[int(target[-1])]).send_signal(number)
        psutil.wait_procs(ranks, timeout=60)
        assert not any(rank.is_running() for rank in ranks)
        output, _ = process.communicate(timeout=TIMEOUT)
    found = checkpoint.find_intact(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert found.nimg == rows[-1]["nimg"]
    assert not list((tmp_path / "run" / "checkpoints").glob("*.partial"))
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text()
    assert "Traceback" not in log
    assert f"at {found.nimg} images, which are saved; the same command resumes" in log
    if target != "launcher":  # which passes nothing on afterwards
        assert f"stopped by {number.name} at {found.nimg} images, which are saved; the same command resumes" in output
    if target == "rank 0":
        assert process.returncode == 0


MOMENTS = {
    "at once": lambda rank: True,
    "importing": lambda rank: any("libtorch_cpu" in file.path for file in rank.memory_maps()),
    "joining": lambda rank: rank.net_connections(),  # rank 1 is kept from coming
    "training": lambda rank: (Path(rank.cwd()) / "run" / "metrics.jsonl").exists(),
}


@pytest.mark.slow
@two_devices
@pytest.mark.parametrize(
    "launcher, target, moment",
    [
        ("deepspeed", 0, "at once"),
        ("deepspeed", 1, "importing"),
        ("torchrun", 0, "joining"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                ("deepspeed", 0, "joining"),
                ("deepspeed", 1, "at once"),
                ("torchrun", 0, "at once"),
                ("torchrun", 0, "training"),
            ]
        ),
    ],
    ids=str,
)
def test_no_rank_outlives_a_launcher_that_is_killed_while_ranks_start(launcher, target, moment, tmp_path):
    """The first and the second process of `deepspeed`, which both are needed."""
    tiny_recipe(tmp_path)
    with started(launcher, tmp_path, *RUN) as process:
        ranks: list[psutil.Process] = []
        until = time.monotonic() + TIMEOUT
        while len(ranks) < 2:
            assert process.poll() is None
            assert time.monotonic() < until
            chain = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            ranks = [p for p in chain if is_rank(p)]
            time.sleep(0.005)
        ranks.sort(key=lambda rank: int(rank.environ()["RANK"]))
        launchers = [p for p in chain if p not in ranks and launching.SCRIPT in p.cmdline()]
        for rank in {"at once": ranks, "joining": ranks[1:]}.get(moment, []):
            rank.suspend()  # most have not looked for their launcher yet
        while not MOMENTS[moment](ranks[0]):
            time.sleep(0.02)
        launchers[target].kill()
        for rank in ranks:
            rank.resume()
        _, alive = psutil.wait_procs(ranks, timeout=110)  # a minute, and imports beside other tests
        alive = [rank for rank in alive if not has_ended(rank)]
        for other in [*alive, *launchers]:
            with suppress(psutil.NoSuchProcess):
                other.kill()
        assert not alive
        process.communicate(timeout=TIMEOUT)
    assert (tmp_path / "run").exists() == (moment == "training")


def has_ended(process: psutil.Process) -> bool:
    """Whether it has, also where nobody has asked for its status yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_rank(process: psutil.Process) -> bool:
    """Whether it has become a rank: between fork and exec it is its launcher's copy."""
    try:
        words = process.cmdline()
        return launching.SCRIPT in words[:3] and "RANK" in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


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
    # Seen a moment before: it may have been the grid at the beginning.
    assert "bigsgan: no progress for 6 s: rank 1 does not answer, last seen in phase '" in line
    assert 'File "' in (tmp_path / "run" / "logs" / "rank00000.log").read_text()  # the stacks
