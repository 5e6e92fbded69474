"""Runs that report to everything at once: killed and resumed, and refused before they begin."""

import csv
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import REPOSITORY
from tests.distributed.launching import SCRIPT, STATUS, launch, needs_two_devices
from tests.tiny import tiny_recipe
from tests.wandb_file import read_segments


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Arguments of a run that reports to all, on a machine without settings of W&B's."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tiny_recipe(tmp_path)
    return ["--config", "tiny.yaml", "out=run", "monitor=[tensorboard, wandb, csv]", "report_nimg=8"]


def curve(out):
    """The generator's loss by nimg, of the CSV file."""
    with (out / "metrics.csv").open(newline="") as file:
        rows = [(int(nimg), float(value)) for nimg, name, value in csv.reader(file) if name == "loss/generator"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["nimg"], row["loss/generator"]) for row in lines] == rows
    return rows


@pytest.mark.slow
@needs_two_devices
def test_a_killed_run_resumes_in_the_same_reports(tmp_path, settings, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings += ["sample_nimg=64", "checkpoint_nimg=64"]
    out = tmp_path / "run"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(REPOSITORY)
    process = subprocess.Popen([sys.executable, SCRIPT, *settings], cwd=tmp_path, env=environment)
    try:
        until = time.monotonic() + 200
        while len(list(out.glob("checkpoints/0*[0-9]"))) < 3:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        time.sleep(3)  # W&B's process writes every second
    finally:
        process.kill()
        process.wait()
    before, resumed = curve(out), int((out / "checkpoints" / "latest").read_text())
    (killed,) = read_segments(out)
    written = killed.series("loss/generator")
    assert len(written) > 8
    assert written == before[: len(written)]
    assert not killed.finished

    done = launch("torchrun", tmp_path, *settings, f"total_nimg={resumed + 128}")
    assert done.returncode == 0, done.stdout
    after = curve(out)
    assert [nimg for nimg, _ in after] == list(range(8, resumed + 129, 8))
    first, second = read_segments(out)
    assert second.finished
    assert first.run_id == second.run_id
    assert second.series("loss/generator") == [(nimg, value) for nimg, value in after if nimg > resumed]
    steps = [row["_step"] for row in first.rows + second.rows]
    assert steps == sorted(set(steps))
    assert second.config["total_nimg"] == resumed + 128
    events = EventAccumulator(str(out), size_guidance={"scalars": 0}).Reload()
    shown = [(event.step, event.value) for event in events.Scalars("loss/generator")]
    assert shown == [(nimg, float(np.float32(value))) for nimg, value in after]
    for tag in ("samples/live", "samples/ema"):
        grids = second.series(f"{tag}/path")
        assert [nimg for nimg, _ in grids] == [resumed + 64, resumed + 128]
        for nimg, path in grids:
            png = out / "samples" / f"{tag.replace('/', '_')}_{nimg:012d}.png"
            assert (second.directory / "files" / path).read_bytes() == png.read_bytes()


@pytest.mark.slow
@needs_two_devices
def test_one_rank_says_that_wandb_is_not_logged_in(tmp_path, settings):
    done = launch("torchrun", tmp_path, *settings)
    assert done.returncode == STATUS["torchrun"]
    said = [line for line in done.stdout.splitlines() if line.startswith("bigsgan: ")]
    problem = "needs an API key of Weights & Biases; run `wandb login`, or set WANDB_MODE=offline"
    assert said == [f"bigsgan: monitor: 'wandb' {problem}"]
    assert not (tmp_path / "run").exists()
