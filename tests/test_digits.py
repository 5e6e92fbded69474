"""The default recipe keeps its promise: ten columns of digits that a classifier reads as asked."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.digits_quality import measure

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_default_recipe_learns_the_digits(tmp_path):
    deepspeed = Path(sys.executable).with_name("deepspeed")
    subprocess.run([deepspeed, "launch/train.py", f"out={tmp_path / 'run'}"], cwd=ROOT, check=True, timeout=1100)
    quality = measure(tmp_path / "run")
    print(quality)
    assert quality["held_out"] >= 0.97
    assert quality["right"] >= 0.90
    assert quality["spread"] >= 0.5
