"""The default recipe and its siblings keep their promise: ten columns of digits that a classifier reads as asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.digits_quality import measure

ROOT = Path(__file__).resolve().parents[1]


def last_report(recipe, run):
    """What the last report and the last metrics of a training say."""
    command = [sys.executable, "launch/train.py", "--config", recipe, f"out={run}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1100)
    *_, report, measured = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    print(report | measured)
    return report | measured


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_autoencoder_makes_the_digits_again(tmp_path):
    last = last_report("digits_autoencoder", tmp_path / "run")
    assert last["nimg"] == 24_576
    assert last["metrics/psnr1k"] > 28
    assert last["metrics/ssim1k"] > 0.98
    assert last["adversarial_weight"] > 0


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_digits_are_drawn_as_outlines_and_filled_again(tmp_path):
    """Both directions come near the real images, and circles back to where they began."""
    last = last_report("digits_cyclegan", tmp_path / "run")
    assert last["nimg"] == 8_192
    assert last["metrics/fid2k_a_to_b"] < 5
    assert last["metrics/fid2k_b_to_a"] < 20
    assert last["loss/cycle"] < 0.25


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "recipe, seed",
    [
        *(pytest.param("digits", seed, marks=pytest.mark.slow) for seed in (0, 1)),
        *(pytest.param("digits", seed, marks=pytest.mark.nightly) for seed in range(2, 8)),
        *(
            pytest.param(f"digits_{family}", 0, marks=pytest.mark.nightly)
            for family in ("afm", "cat", "dcgan", "dit", "gat", "r3gan", "stylegan2")
        ),
    ],
)
def test_recipes_learn_the_digits(recipe, seed, tmp_path):
    deepspeed = Path(sys.executable).with_name("deepspeed")
    config = [] if recipe == "digits" else ["--config", f"launch/recipes/{recipe}.yaml"]
    command = [deepspeed, "launch/train.py", *config, f"out={tmp_path / 'run'}", f"seed={seed}"]
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
    if recipe == "digits":
        *_, measured = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        assert measured["metrics/fid2k"] < 12
    assert quality["held_out"] >= 0.97
    assert quality["right"] >= 0.90
    assert quality["spread"] >= 0.5
