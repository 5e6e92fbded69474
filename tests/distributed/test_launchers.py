"""The real launchers with two ranks: bad input is answered once, and the job ends with a non-zero status.

deepspeed passes our status 2 on; torchrun turns it into 1 and adds a traceback of its own, so that only our message
counts.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from bigsgan.config.deepspeed_file import REPOSITORY
from tests.tiny import tiny_recipe

SCRIPT = str(REPOSITORY / "launch" / "train.py")
STATUS = {"deepspeed": 2, "torchrun": 1}
TIMEOUT = 120
"""Below it by far: ranks that wait for one that has ended would sit there for half an hour."""

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="deepspeed starts no two ranks on a single GPU")


def launch(launcher: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script on two ranks, as a user of this interpreter's environment would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = "--num_gpus" if launcher == "deepspeed" else "--nproc_per_node"
    command = [launcher, ranks, "2", "--master_port", str(port), SCRIPT, *arguments]
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return subprocess.run(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT
    )


def check(launcher: str, result: subprocess.CompletedProcess[str], message: str) -> None:
    """The message stands once in all of both ranks' output, and none of our code is in a traceback."""
    assert result.returncode == STATUS[launcher], result.stdout
    lines = [line for line in result.stdout.splitlines() if "bigsgan: " in line]
    assert lines == [f"bigsgan: {message}"], result.stdout
    assert f"{REPOSITORY / 'bigsgan'}{os.sep}" not in result.stdout, result.stdout


@pytest.mark.parametrize("launcher", STATUS)
def test_a_bad_recipe_is_answered_once(launcher, tmp_path):
    result = launch(launcher, tmp_path, "batch=63")
    problem = "63 does not divide into 1 micro-batches on 2 ranks for the generator"
    check(launcher, result, f"batch: {problem}; set batch to a multiple of 2, such as batch=64")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_recipe_once(tmp_path):
    result = launch("torchrun", tmp_path, "--dry-run", "seed=7")
    assert result.returncode == 0
    _, out, rest = result.stdout.partition("out: ")
    printed = yaml.safe_load(out + rest)  # the launcher's own lines come before it
    assert printed["seed"] == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_under_deepspeed(tmp_path):
    result = launch("deepspeed", tmp_path, "--dry-run", "seed=7")
    assert result.returncode == 0
    assert result.stdout.splitlines().count("seed: 7") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", STATUS)
def test_what_every_rank_meets_after_the_start_is_answered_once(launcher, tmp_path):
    (tmp_path / "images" / "one").mkdir(parents=True)
    result = launch(launcher, tmp_path, "data.kind=folder", "data.root=images")
    problem, remedy = "10 but images has 1 class folders (one)", "set data.num_classes=1, or 0 to train without classes"
    check(launcher, result, f"data.num_classes: {problem}; {remedy}")


@pytest.mark.slow
def test_what_rank_0_meets_for_all_is_answered_once(tmp_path):
    recipe = tiny_recipe(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoints" / "000000000064"
    checkpoint.mkdir(parents=True)
    manifest = {"format": 1, "nimg": 64, "world_size": 2, "layout": {}, "numbers": {}, "files": {}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "run" / "config.yaml").write_text(recipe.to_yaml())
    result = launch("torchrun", tmp_path, "--config", "tiny.yaml", "out=run", "batch=16")
    message = "batch: 16 was 8 in the run that run holds; set it back to go on, or give another `out` to start anew"
    check("torchrun", result, message)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("launcher", STATUS)
@pytest.mark.parametrize("blocked", ["metrics.jsonl", "logs/rank00001.log"])  # which rank 0 and rank 1 write
def test_what_one_rank_alone_meets_ends_all(launcher, blocked, tmp_path):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "run" / blocked).mkdir(parents=True)
    result = launch(launcher, tmp_path, "--config", "tiny.yaml", "out=run", f"total_nimg={recipe.batch}")
    remedy = "make room or allow writing there, or choose another place"
    check(launcher, result, f"run/{blocked}: cannot be written: Is a directory; {remedy}")
