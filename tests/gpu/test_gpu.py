"""On a GPU: the default recipe, and BigGAN-128 at full width in bf16 and fp16 at every sharded stage."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(out: Path, *arguments: str) -> list[dict[str, float]]:
    """Reports of a run of launch/train.py on one GPU."""
    command = [sys.executable, "launch/train.py", *arguments, f"out={out}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "images_per_second" in row]  # others have what was measured on images


def check(rows: list[dict[str, float]]) -> None:
    for row in rows:
        assert math.isfinite(row["loss/generator"])
        assert math.isfinite(row["loss/discriminator"])
    print({key: rows[-1][key] for key in ("images_per_second", "memory/max_gib", "loss_scale/generator")})


def test_default_recipe(tmp_path):
    rows = train(tmp_path / "run", "total_nimg=4096", "sample_nimg=4096", "checkpoint_nimg=4096")
    check(rows)
    assert rows[-1]["loss/discriminator"] < 2.0  # two hinges at a margin of 1, before anything is learnt


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_biggan128(tmp_path, stage, precision):
    ds_config = f"ds_configs/zero{stage}_{precision}.json"
    rows = train(
        tmp_path / "run", "--config", "launch/recipes/biggan128_imagenet.yaml", "data.kind=synthetic", "data.root=null",
        f"engines.generator.ds_config={ds_config}", f"engines.discriminator.ds_config={ds_config}",
        "batch=64", "total_nimg=1024", "report_nimg=256", "sample_nimg=1024", "checkpoint_nimg=1024",
    )  # fmt: skip
    check(rows)
    assert rows[-1]["skipped/generator"] + rows[-1]["skipped/discriminator"] <= (24 if precision == "fp16" else 0)
