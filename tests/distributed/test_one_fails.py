"""Whatever ends one rank ends all within a minute, with one message: without a launcher, as on two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.ports import free_port
from tests.tiny import tiny_recipe

SCRIPT = str(REPOSITORY / "tests" / "distributed" / "failing.py")
STARTING = 400
"""Seconds until ranks fail, on a busy machine."""

RUN = ["--config", "tiny.yaml", "out=run", "total_nimg=32", "report_nimg=8", "checkpoint_nimg=16"]
MEASURES = "metrics={names: [fid64], every_nimg: 8}"


def start(directory: Path, where: str, how: str, who: str, *words: str) -> list[subprocess.Popen[str]]:
    """Two ranks, each with a host of its own as far as it can see, and a file ``rank<r>.txt`` for what it prints."""
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env.update(MASTER_PORT=str(free_port()), PYTHONPATH=str(REPOSITORY))
    env.pop("DS_ACCELERATOR", None)
    processes = []
    for rank in ("0", "1"):
        with (directory / f"rank{rank}.txt").open("w") as file:
            run = [word for word in RUN if word.partition("=")[0] not in [each.partition("=")[0] for each in words]]
            command = [sys.executable, SCRIPT, where, how, who, *run, *words]
            processes.append(
                subprocess.Popen(command, cwd=directory, env={**env, "RANK": rank}, stdout=file, stderr=file, text=True)
            )
    return processes


def ended(directory: Path, processes: list[subprocess.Popen[str]]) -> tuple[list[int], float, list[str]]:
    """The statuses of the ranks, seconds from the failure until all have ended, and the messages."""
    try:
        for process in processes:
            process.wait(STARTING)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [line for rank in (0, 1) for line in (directory / f"rank{rank}.txt").read_text().splitlines()]
    failed = min(float(line.split()[0]) for line in lines if line.endswith(" fails"))
    return [p.returncode for p in processes], time.time() - failed, [each for each in lines if "bigsgan: " in each]


GONE = "ended without a message: killed, or crashed, or its host is gone"
SAID = {"killed": [GONE], "raises": ["failed in phase", ": KeyError: 'planted'"], "refuses": ["data.root: 'images' is"]}
STATUS = {"killed": [1, -9], "raises": [1, 1], "refuses": [2, 2]}
PLACES = ["first collective", "build", "samples", "evaluation", "update", "save", "end"]


@pytest.mark.slow
@pytest.mark.parametrize("where, how", [("build", "killed"), ("save", "killed"), ("samples", "refuses")])
def test_a_rank_that_fails_ends_one_that_waits_for_its_device(tmp_path, where, how):
    check(tmp_path, where, how)


@pytest.mark.nightly
@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("where", PLACES)
def test_wherever_it_fails(tmp_path, where, how):
    check(tmp_path, where, how)


def check(directory: Path, where: str, how: str, who: str = "-1") -> None:
    """All end within a minute, with the message once, and with the status of the one that fails."""
    tiny_recipe(directory)
    words = [MEASURES] if where == "evaluation" else []
    statuses, seconds, messages = ended(directory, start(directory, where, how, who, *words))
    print(f"{where}, {how}: {seconds:.0f} s")
    assert seconds < 60
    assert sorted(statuses) == sorted(STATUS[how])
    (message,) = messages
    assert all(part in message for part in SAID[how])


@pytest.mark.nightly
@pytest.mark.parametrize("how", SAID)
def test_where_the_first_rank_fails_the_store_goes_with_it(tmp_path, how):
    check(tmp_path, "build", how, "-0")


@pytest.mark.nightly
@pytest.mark.parametrize("how", SAID)
def test_a_rank_that_resumes(tmp_path, how):
    tiny_recipe(tmp_path)
    whole = start(tmp_path, "joining", "nothing", "9")
    assert [process.wait(STARTING) for process in whole] == [0, 0]
    statuses, seconds, messages = ended(tmp_path, start(tmp_path, "restore", how, "-1", "total_nimg=64"))
    assert seconds < 60
    assert sorted(statuses) == sorted(STATUS[how])
    assert [SAID[how][-1] in message for message in messages] == [True]


@pytest.mark.slow
def test_what_one_host_alone_refuses_before_the_ranks_have_met(tmp_path):
    """Here a file that is only on one of them; the other has begun to wait."""
    tiny_recipe(tmp_path)
    processes = start(tmp_path, "joining", "refuses", "1")
    statuses, seconds, messages = ended(tmp_path, processes)
    assert statuses == [2, 2]
    assert seconds < 60
    (message,) = messages
    assert message.endswith("bigsgan: data.root: 'images' is planted; plant nothing")
