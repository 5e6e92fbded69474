"""The real launchers with two ranks: bad input is answered once, and the job ends with a non-zero status.

deepspeed passes our status 2 on; torchrun turns it into 1 and adds a traceback of its own, so that only our message
counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import time

import numpy as np
import psutil
import pyarrow.parquet
import pytest
import yaml
from PIL import Image

from bigsgan.checkpoint.tags import sealed
from tests import REPOSITORY
from tests.distributed import launching
from tests.distributed.launching import STATUS, TIMEOUT, launch, rank_processes, started
from tests.tiny import tiny_recipe

pytestmark = launching.needs_two_devices

TIERS = {"deepspeed": pytest.mark.slow, "torchrun": pytest.mark.nightly}


def check(launcher: str, result: subprocess.CompletedProcess[str], message: str) -> None:
    """The message stands once in all of both ranks' output, and none of our code is in a traceback."""
    assert result.returncode == STATUS[launcher], result.stdout
    lines = [line for line in result.stdout.splitlines() if "bigsgan: " in line]
    assert lines == [f"bigsgan: {message}"], result.stdout
    assert f"{REPOSITORY / 'bigsgan'}{os.sep}" not in result.stdout, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_bad_recipe_is_answered_once(launcher, tmp_path):
    result = launch(launcher, tmp_path, "batch=63")
    problem = "must be a multiple of 2, got 63 (1 micro-batch on 2 ranks for the generator)"
    check(launcher, result, f"batch: {problem}; set batch=64")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_prints_the_recipe_once(tmp_path):
    result = launch("torchrun", tmp_path, "--dry-run", "seed=7")
    assert result.returncode == 0
    _, out, rest = result.stdout.partition("out: ")
    printed = yaml.safe_load(out + rest)  # the launcher's own lines come before it
    assert printed["seed"] == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_every_rank_meets_after_the_start_is_answered_once(tmp_path):
    launcher = "deepspeed"
    (tmp_path / "images" / "one").mkdir(parents=True)
    Image.new("L", (16, 16)).save(tmp_path / "images" / "one" / "1.png")
    result = launch(launcher, tmp_path, "data.kind=folder", "data.root=images", "metrics=null")
    problem = "must be 1 with this data, got 10 (images has 1 class folder (one))"
    remedy = "set data.num_classes=1, or 0 to train without classes"
    check(launcher, result, f"data.num_classes: {problem}; {remedy}")


@pytest.mark.slow
def test_what_rank_0_meets_for_all_is_answered_once(tmp_path):
    recipe = tiny_recipe(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoints" / "000000000064"
    checkpoint.mkdir(parents=True)
    layout = {f"{network}.precision": "fp32" for network in ("generator", "discriminator")}
    manifest = {"format": 2, "nimg": 64, "world_size": 2, "layout": layout, "recipe": recipe.model_dump()}
    manifest.update({key: {} for key in ("metrics", "numbers", "kinds", "files", "holders")})
    (checkpoint / "manifest.json").write_text(json.dumps(sealed(manifest)))
    (tmp_path / "run" / "config.yaml").write_text(recipe.to_yaml())
    result = launch("torchrun", tmp_path, "--config", "tiny.yaml", "out=run", "batch=16")
    message = (
        "batch: must be 8, as in the run 'run', got 16; set it back to resume, or give another `out` to start a new"
    )
    message += " run; or accept it by --allow-change batch"
    check("torchrun", result, message)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch"] == 8


@pytest.mark.parametrize(  # which rank 0 and rank 1 write
    "launcher, blocked",
    [
        pytest.param("torchrun", "metrics.jsonl", marks=TIERS["torchrun"]),
        pytest.param("deepspeed", "logs/rank00001.log", marks=TIERS["deepspeed"]),
    ],
)
def test_what_one_rank_alone_meets_ends_all(launcher, blocked, tmp_path):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "run" / blocked).mkdir(parents=True)
    result = launch(launcher, tmp_path, "--config", "tiny.yaml", "out=run", f"total_nimg={recipe.batch}")
    remedy = "free some space, fix its permissions, or choose another path"
    check(launcher, result, f"run/{blocked}: cannot be written: Is a directory; {remedy}")


@pytest.mark.slow
def test_ranks_train_on_parquet_as_on_the_same_images_in_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny_recipe(tmp_path)
    rows: dict[str, list] = {"image": [], "label": []}
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 9, 8), dtype=np.uint8)):
        path = tmp_path / f"folders/{number // 4}/{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        rows["image"].append({"bytes": path.read_bytes(), "path": path.name})
        rows["label"].append(number // 4)
    (tmp_path / "rows").mkdir()
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "rows/0.parquet")
    losses = []
    for kind, root in (("huggingface", "rows"), ("folder", "folders")):
        options = ["--config", "tiny.yaml", f"out={kind}", f"data.kind={kind}", f"data.root={root}", "report_nimg=8"]
        options += ["data.num_workers=2", "data.num_classes=10", "metrics=null", "total_nimg=64"]
        result = launch("torchrun", tmp_path, *options)
        assert result.returncode == 0, result.stdout
        records = map(json.loads, (tmp_path / kind / "metrics.jsonl").read_text().splitlines())
        losses.append([{key: value for key, value in each.items() if "loss" in key} for each in records])
    assert any(losses[0])
    assert losses[0] == losses[1]


STAGES = ["engines.generator.pipeline_stages=2", "engines.discriminator.pipeline_stages=2"]


@pytest.mark.parametrize("launcher", [pytest.param(name, marks=tier) for name, tier in TIERS.items()])
def test_a_killed_stage_ends_the_whole_job(launcher, tmp_path):
    """Within a minute, with a status other than 0, and leaving no rank behind."""
    tiny_recipe(tmp_path)
    with started(launcher, tmp_path, "--config", "tiny.yaml", "out=run", "report_nimg=8", *STAGES) as process:
        ranks = rank_processes(process, tmp_path / "run")
        ranks[-1].kill()
        killed = time.monotonic()
        process.communicate(timeout=TIMEOUT)
        assert time.monotonic() - killed < 60
        assert process.returncode != 0
        _, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive
