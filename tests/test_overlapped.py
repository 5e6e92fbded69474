"""Updates that overlap, as a user sees them: what says so, and that a run keeps its schedule."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tiny import tiny_recipe

ROOT = Path(__file__).resolve().parents[1]


def train(directory: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    own = [f"out={directory / 'run'}", "report_nimg=8", "sample_nimg=1000", "checkpoint_nimg=1000"]
    command = [sys.executable, "launch/train.py", "--config", directory / "tiny.yaml", *own, *overrides]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=240)


@pytest.mark.slow
def test_a_run_says_so_and_keeps_its_schedule(tmp_path):
    tiny_recipe(tmp_path)
    overlapped = "objective.schedule=overlapped"
    begun = train(tmp_path, "total_nimg=16", overlapped)
    assert begun.returncode == 0, begun.stderr
    line = f"{overlapped}: each network learns from the other as it was an update ago"
    assert line in begun.stdout + begun.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["nimg"], row["staleness"]) for row in rows if "loss/generator" in row] == [(8, 1.0), (16, 1.0)]
    board = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [event.value for event in board.Scalars("staleness")] == [1.0, 1.0]
    (recipe,) = board.Tensors("recipe/text_summary")
    assert "schedule: overlapped" in recipe.tensor_proto.string_val[0].decode()
    manifest = json.loads((tmp_path / "run/checkpoints/000000000016/manifest.json").read_text())
    assert manifest["recipe"]["objective"]["schedule"] == "overlapped"
    assert manifest["numbers"]["kept_images"] == {"update": 2, "d_steps": 1, "batch": 8}

    other = train(tmp_path, "total_nimg=24")
    assert other.returncode == 2
    assert "objective.schedule: must be 'overlapped', as in the run" in other.stderr
    assert "(with init_from to keep the weights)" in other.stderr
    on = train(tmp_path, "total_nimg=24", overlapped)
    assert on.returncode == 0, on.stderr
    assert line in on.stdout + on.stderr
