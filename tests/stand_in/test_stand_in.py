"""Whole updates "on CUDA" without a GPU: they run, wait where docs/deepspeed.md says, and no two streams race."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bigsgan.config import NETWORKS
from tests.stand_in import build
from tests.tiny import FAMILIES, zero

ROOT = Path(__file__).resolve().parents[2]
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
HOST = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST = {**HOST, "offload_param": {"device": "cpu"}}
ADAM = [f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS]
CLIPPED = [*ADAM, *(f"optimizer.{network}.clip_norm=1" for network in NETWORKS)]
R1 = "objective.r1={weight: 0.1, every: 2}"
STAGES = [f"engines.{network}.pipeline_stages=2" for network in NETWORKS]

GATHERS = {"partition_parameters.py:wait"}
"""What stage 3 waits for."""

HOST_DECIDES = {"utils.py:is_invalid_grad_norm"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle())),
]


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("stand_in")
    return build.environment(directory, build.build(directory))


def run(stand_in: dict[str, str], cells: list[dict[str, Any]], num_ranks: int, *words: str) -> list[dict[str, Any]]:
    """What each rank says of each cell."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    where |= {"LOCAL_SIZE": str(num_ranks), "STAND_IN_DEVICES": str(num_ranks), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.stand_in.cells", json.dumps(cells), *words]
    processes = []
    for rank in map(str, range(num_ranks)):
        environment = {**os.environ, **stand_in, **where, "RANK": rank, "LOCAL_RANK": rank}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
    try:
        outputs = [process.communicate(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * num_ranks, outputs[0][1][-3000:]
    found = [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    assert sorted(each["name"] for each in found) == sorted([cell["name"] for cell in cells] * num_ranks)
    for each in found:
        assert "error" not in each, f"{each['name']}: {each['error']}\n{each['traceback'][-3000:]}"
    return found


def cell(name: str, overrides: Iterable[str], ds: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "overrides": list(overrides), "ds": ds}


@pytest.mark.parametrize(
    "ds, allowed",
    [(zero(0), set()), (zero(1, **BF16), set()), (zero(2, **FP16), HOST_DECIDES), (zero(3, **BF16), GATHERS)],
    ids=["0", "1-bf16", "2-fp16", "3-bf16"],
)
def test_every_family_runs_and_waits_where_the_docs_say(stand_in, ds, allowed):
    cells = [
        cell(name, [*(line for line in overrides if not line.startswith("optimizer")), *ADAM], ds)
        for name, overrides in {"biggan": [R1], **FAMILIES}.items()
    ]
    for found in run(stand_in, cells, 1):
        assert set(found["waits"]) <= allowed, found
        assert found["launches"] > 100, found


def test_every_family_has_deterministic_kernels(stand_in):
    """torch raises at an operation that has none."""
    recipes = {"biggan": [R1], "diffaugment": ["augmentation={kind: diffaugment}"], **FAMILIES}
    cells = [cell(name, ["deterministic=true", *overrides], zero(0)) for name, overrides in recipes.items()]
    run(stand_in, cells, 1, "deterministic")


RACES = {
    "0": cell("0", [*CLIPPED, R1, "accumulation=2"], zero(0)),
    "2-bf16": cell("2-bf16", [*CLIPPED, R1, "accumulation=2"], zero(2, **BF16)),
    "3": cell("3", [*CLIPPED, R1, "accumulation=2"], zero(3)),
    "3-bf16-host": cell("3-bf16-host", [*ADAM, R1], zero(3, zero=ALL_ON_HOST, **BF16)),
    "1-fp16-host": cell("1-fp16-host", [*ADAM, R1], zero(1, zero=HOST, **FP16)),
    "pipeline": cell("pipeline", [*STAGES, *CLIPPED, "accumulation=2"], zero(1, **BF16)),
}


@pytest.mark.parametrize("name", RACES)
def test_no_two_streams_race(stand_in, name):
    """By torch's sanitizer, which raises where one stream writes what another uses, and nothing orders them."""
    run(stand_in, [RACES[name]], 2, "sanitizer")
