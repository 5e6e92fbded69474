"""docs/how-to/own-network.md as it stands there, in a folder outside the repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bigsgan.config import load_recipe
from bigsgan.models.outside_check import check_outside
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "docs" / "how-to" / "own-network.md").read_text()
SHORT = ["total_nimg=64", "report_nimg=32", "sample_nimg=32", "checkpoint_nimg=32", "batch=16"]
DIT = 'generator={family: "adapter:OneStep", latent_size: 256}'
LAYERS = 'generator={family: "mylayers:generator", latent_size: 32}'
PLAIN = 'discriminator={family: "mynets:Discriminator"}'
SCALES = 'discriminator={family: "multiscale:Discriminator"}'
FORMS = {"zero1": [DIT], "zero3": [DIT], "stages": [LAYERS, "engines.generator.pipeline_stages=2", "accumulation=2"]}


@pytest.fixture
def folder(tmp_path):
    """The guide's files, and a DiT."""
    for name, text in re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```", GUIDE, flags=re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "tests" / "public_dit.py", tmp_path / "dit.py")
    for stage in (1, 3):
        (tmp_path / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return tmp_path


def run(folder, *words, program=("-m", "bigsgan")):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *program, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def weights(path):
    with safe_open(path, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("changes", [[], [LAYERS], [DIT], [SCALES]])
def test_its_networks_pass_the_check(folder, changes, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    for name in ("mynets", "mylayers", "multiscale", "adapter", "dit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    check_outside(load_recipe(folder / "own.yaml", changes), 2)


@pytest.mark.slow
def test_the_guide(folder):
    """Train, resume, sample, export and open, on one rank."""
    run(folder, "train", "--config", "own.yaml", *SHORT[1:], "total_nimg=32")
    assert "Resuming" in run(folder, "train", "--config", "own.yaml", *SHORT)
    run(folder, "train", "--config", "own.yaml", *SHORT[1:], "total_nimg=32", SCALES, "out=runs/scales")
    run(folder, "sample", "--run", "runs/own", "--out", "samples.png")
    run(folder, "export", "--run", "runs/own", "--out", "generator.safetensors")
    assert (folder / "samples.png").stat().st_size > 1000
    opening = (
        folder / "opening.py"
    ).read_text() + "import torch\nprint(G(torch.zeros(2, 32), torch.zeros(2).long()).shape)\n"
    (folder / "opening.py").write_text(opening)
    assert "torch.Size([2, 1, 16, 16])" in run(folder, "opening.py", program=())


@pytest.mark.slow
def test_layouts_train_the_same_network(folder):
    """A public DiT by an adapter of less than 20 lines, and layers in stages, on two ranks as on one."""
    assert len((folder / "adapter.py").read_text().splitlines()) <= 20

    def trained(out, *options, program=("-m", "bigsgan")):
        common = [*SHORT, f"out={out}", "objective.r1=null", "optimizer.generator={kind: sgd, lr: 0.01}"]
        run(folder, "train", "--config", "own.yaml", PLAIN, *common, *options, program=program)
        run(folder, "export", "--run", out, "--live", "--out", f"{out}.safetensors")
        return weights(folder / f"{out}.safetensors")

    alone = {network: trained(name, network) for name, network in (("dit", DIT), ("layers", LAYERS))}
    for form, overrides in FORMS.items():
        file = "zero3" if form == "zero3" else "zero1"
        ds = [f"engines.{network}.ds_config={file}.json" for network in ("generator", "discriminator")]
        ranks = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", "-m", "bigsgan")
        one, two = alone[overrides[0]], trained(form, *overrides, *ds, program=ranks)
        assert one.keys() == two.keys()
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)
