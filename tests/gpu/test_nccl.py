"""The product on two ranks that share a GPU over NCCL, or on CPUs: what it learns, and what ends it.

``python -m tests.gpu --nccl`` says what it takes. Each rank is started by itself, as on a host with one GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigsgan.config import NETWORKS
from tests import REPOSITORY
from tests.distributed.pool import OVER_NCCL
from tests.ports import free_port
from tests.tiny import stages, zero

pytestmark = pytest.mark.skipif(
    os.environ.get(OVER_NCCL) != "1", reason=f"takes minutes, and on a GPU NCCL 2.30: set {OVER_NCCL}=1"
)

SECONDS = 120
GAME = [
    *["--config", "digits", "batch=16", "accumulation=2"],
    *(f"optimizer.{network}={{kind: sgd, lr: 0.002}}" for network in NETWORKS),
]
SAME = 1e-4
"""Of a tensor's largest element: one rank and two sum in another order, three times."""
LEAST = 1e-2
"""Below it lie biases in front of batch norm, whose gradient is rounding."""

ALONE = "engines.generator.ranks=1"
LAYOUTS = {
    "ZeRO 0": (0, []),
    "ZeRO 2": (2, []),
    "ZeRO 3": (3, []),
    "stages": (1, stages(2, 2)),
    "stages, phases": (1, [*stages(2, 2), "pipeline.schedule=phases"]),
    "G in stages": (1, stages(2, 1)),
    "ranks of their own": (2, [ALONE]),
}


@contextmanager
def started(num: int, directory: Path, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of the script beside the block, by rank; what is left of them at its end is killed."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num)}
    shared = {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    exact = {"OMP_NUM_THREADS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), *GAME, *words]
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num):
            env = {**os.environ, **meet, **shared, **exact, "RANK": str(rank)}
            out = (directory / f"rank{rank}.txt").open("w")
            pipes = {"stdout": out, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, cwd=directory, env=env, start_new_session=True, **pipes))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def said(directory: Path) -> str:
    return "".join(f"rank {path.stem[4:]}:\n{path.read_text()}" for path in sorted(directory.glob("rank*.txt")))


def train(num: int, directory: Path, out: str, *words: str) -> None:
    with started(num, directory, f"out={out}", "total_nimg=48", *words) as processes:
        assert [process.wait(timeout=SECONDS) for process in processes] == [0] * num, said(directory)


def weights(directory: Path, out: str) -> dict[str, torch.Tensor]:
    """Live weights of both networks, and the EMA, as exported."""
    found = {}
    for name, words in {"G": ["--live"], "EMA": ["--ema"], "D": ["--network", "discriminator"]}.items():
        target = directory / f"{out}-{name}.safetensors"
        command = [
            sys.executable,
            "-m",
            "bigsgan",
            "export",
            "--run",
            out,
            "--out",
            str(target),
            *words,
            "--no-standing",
        ]
        subprocess.run(command, cwd=directory, check=True, timeout=SECONDS)
        found |= {f"{name} {key}": value for key, value in load_file(target).items()}
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What one rank learns."""
    directory = tmp_path_factory.mktemp("one")
    train(1, directory, "one")
    return weights(directory, "one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_learns_what_one_rank_learns(layout, expected, tmp_path):
    stage, options = LAYOUTS[layout]
    (tmp_path / "zero.json").write_text(json.dumps(zero(stage)))
    files = [f"engines.{network}.ds_config=zero.json" for network in NETWORKS]
    train(2, tmp_path, "two", *files, *options)
    found = weights(tmp_path, "two")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = SAME * max(LEAST, float(value.abs().max()))
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


GOING = ["report_nimg=16", "out=run"]


def wait_for_report(directory: Path, processes: list[subprocess.Popen[str]]) -> None:
    report, late = directory / "run" / "metrics.jsonl", time.monotonic() + SECONDS
    while not (report.exists() and report.read_text()):
        assert [process.poll() for process in processes] == [None, None], said(directory)
        assert time.monotonic() < late, said(directory)
        time.sleep(0.2)


@pytest.mark.parametrize("number, limit", [(signal.SIGKILL, 60), (signal.SIGSTOP, 60)])
@pytest.mark.parametrize("options", [[], stages(2, 2), [ALONE]], ids=["whole", "stages", "ranks of their own"])
def test_a_rank_that_is_killed_or_stops_ends_the_other(options, number, limit, tmp_path):
    with started(2, tmp_path, *GOING, "hang_timeout_seconds=10", *options) as processes:
        wait_for_report(tmp_path, processes)
        processes[1].send_signal(number)
        begun = time.monotonic()
        assert processes[0].wait(timeout=SECONDS) not in (0, 2), said(tmp_path)
        seconds = time.monotonic() - begun
    print(f"rank 0 ended after {seconds:.0f} s: {said(tmp_path).count('bigsgan: ')} lines")
    assert seconds < limit
    assert "rank 1" in "".join(line for line in said(tmp_path).splitlines() if "bigsgan: " in line)


def test_a_rank_that_fails_while_the_run_is_built_ends_the_other(tmp_path):
    (tmp_path / "run" / "logs" / "rank00001.log").mkdir(parents=True)
    with started(2, tmp_path, *GOING) as processes:
        begun = time.monotonic()
        assert processes[1].wait(timeout=SECONDS) == 2
        assert processes[0].wait(timeout=SECONDS) != 0, said(tmp_path)
    print(f"both ended after {time.monotonic() - begun:.0f} s")
    assert "cannot be written" in said(tmp_path)
