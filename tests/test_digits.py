"""The default recipe and its siblings keep their promise: ten columns of digits that a classifier reads as asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.digits_quality import measure

ROOT = Path(__file__).resolve().parents[1]


HALF = "total_nimg=16384"
"""Of 32,768 images: 42 % of the samples are as asked then, where a run of 2,048 images has 11 %, as by chance."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "recipe, overrides, right",
    [
        pytest.param("digits", [HALF], 0.25, marks=pytest.mark.slow, id="half"),
        *(
            pytest.param(name, [], 0.90, marks=pytest.mark.nightly, id=name)
            for name in ("digits", *(f"digits_{f}" for f in ("cat", "dcgan", "gat", "r3gan", "stylegan2")))
        ),
    ],
)
def test_recipes_learn_the_digits(recipe, overrides, right, tmp_path):
    deepspeed = Path(sys.executable).with_name("deepspeed")
    config = [] if recipe == "digits" else ["--config", f"launch/recipes/{recipe}.yaml"]
    command = [deepspeed, "launch/train.py", *config, f"out={tmp_path / 'run'}", *overrides]
    built = tmp_path / "built"
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(built)}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=1100)
    for path in ("metrics.jsonl", "samples/samples_ema_*.png", "checkpoints/*/manifest.json"):
        files = [*(tmp_path / "run").glob(path)]
        assert files, path
        assert all(file.stat().st_size for file in files), path
    assert not built.exists() or not list(built.iterdir())  # nothing on the default path is compiled
    quality = measure(tmp_path / "run")
    print(quality)
    assert quality["held_out"] >= 0.97
    assert quality["right"] >= right
    assert quality["spread"] >= 0.5
