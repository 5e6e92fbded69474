"""`bigsgan doctor --only nccl` on two ranks, over gloo where there is no GPU: one report, whatever fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigsgan.doctor import collectives
from bigsgan.doctor.checks import Finding, Subject
from bigsgan.runtime import comm
from tests import REPOSITORY
from tests.ports import free_port


def report(directory: Path, *names: str) -> dict[str, dict[str, object]]:
    """The checks of the report by name."""
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = str(REPOSITORY)
    command = ["torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), "--no-python", sys.executable]
    words = [word for name in names for word in ("--only", name)]
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(
        [*command, "-m", "bigsgan", "doctor", "--json", *words], cwd=directory, env=env, capture_output=True, text=True
    )
    print(done.stderr[-4000:])
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.slow
def test_a_kill_and_what_follows_it(tmp_path):
    found = report(tmp_path, "nccl.links", "nccl.killed")
    assert [check["status"] for check in found.values()] == ["pass", "pass"]
    numbers = found["nccl.killed"]["ranks"][0]["numbers"]
    assert numbers["statuses"] == [1, -9]
    assert max(numbers["seconds"]) < 60
    assert "rank 1 on " in numbers["said"][0]


@pytest.mark.nightly
def test_the_whole_report(tmp_path):
    found = report(tmp_path, "nccl")
    assert {check["status"] for check in found.values()} == {"pass"}
    numbers = found["nccl.speed"]["ranks"][0]["numbers"]
    assert 0 < numbers["share"] < 1.5
    assert len(numbers["images_per_second_of_single_ranks"]) == 2
    assert list(tmp_path.iterdir()) == []


def rates_found() -> Finding:
    return collectives.rates(Subject(SimpleNamespace(rank=comm.rank(), size=comm.world_size(), hosts=["a", "a"])))


@pytest.mark.slow
def test_rates_are_of_what_a_rank_sends(ranks):
    for finding in ranks(2).run(rates_found):
        rows = finding.numbers["sizes"]
        names = ["all-reduce", "all-gather", "reduce-scatter"]
        assert [(row["collective"], row["bytes"]) for row in rows] == [
            (name, size) for size in collectives.RATED_SIZES for name in names
        ]
        for row in rows:
            sent = row["bytes"] * (2 if row["collective"] == "all-reduce" else 1) // 2
            assert row["rate"] == pytest.approx(sent / row["seconds"])
