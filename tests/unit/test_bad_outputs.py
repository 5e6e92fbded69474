"""Bad options of sample and export, on a run that is good: found out once torch is imported, as in test_bad_runs.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from bigsgan import cli, export, sample
from bigsgan.checkpoint import saver
from bigsgan.config.data import Data
from bigsgan.errors import UserError
from bigsgan.inference.columns import choose_columns
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from tests.bad_runs import LAYOUT, check
from tests.single_process import save, whole
from tests.tiny import tiny_recipe

SAMPLE: dict[str, tuple[str, ...]] = {
    "--run missing --out x.png": ("--run", "must be a run directory, got 'missing'", "give the `out` of a run"),
    "--run run --out x.png --num 0": ("--num", "must be 1 to 1000000000, got 0", "give a number in this range"),
    "--run run --out x.png --num 1000000000": ("--num", "must be at most 4194304 with images of 16", "give a smaller"),
    "--run run --out x.png --classes 3,10": ("--classes", "must be 0 to 9, the classes of the run,", "give numbers"),
    "--run run --out x.png --classes 0-99999999999999999": ("--classes", "must be 0 to 9, the classes", "give numbers"),
    "--run run --out x.png --classes 5-3": ("--classes", "must be a class, got '5-3'", "such as 3,17,200-209"),
    "--run run --out x.png --classes 0-9 --num 9": ("--num", "must be at least 10, the number of", "--num 10 or more"),
    "--run run --out x.png --batch 0": ("--batch", "must be 1 to 65536, got 0", "give a number in this range"),
    "--run run --out x.png --truncation nan": ("--truncation", "must be at least 0.02, got nan", "give a number such"),
    "--run run --out x.png --seed -1": ("--seed", "must be 0 to 9223372036854775807, got -1", "give a number in this"),
    "--run run --out x.png --nimg 63": ("--nimg", "must be a saved checkpoint, got 63", "choose from 64"),
    "--run run --out run": ("--out", "must be a file, got 'run' (it is a directory)", "give the path of a file in it"),
    "--run run --files --out run/samples": ("--out", "'run/samples' belongs to the run run", "give a path outside the"),
    "--run run --files --out run/config.yaml": ("--out", "must be a directory, got", "give a directory"),
    "--run run --out no/x.png": ("--out", "must lie in a directory, got 'no/x.png'", "make the directory first"),
    "--run run --out x.jpg": ("--out", "must end in .png, .gif or .npz, got 'x.jpg'", "give x.png"),
}


EXPORT: dict[str, tuple[str, ...]] = {
    "--run run --out x --format onnx": ("--out", "must end in .onnx with --format onnx, got 'x'", "give x.onnx"),
    "--run run --out x.onnx --format torch-export": ("--out", "must end in .pt2 with --format torch-", "give x.pt2"),
    "--run run --out x.pt2 --dtype bf16": ("--dtype", "must be fp32 with --format torch-export,", "remove the option"),
    "--run run --out x.pt2 --network discriminator": ("--format", "'torch-export' needs the generator", "safetensors"),
    "--run run --out x --format hub --network discriminator": ("--format", "'hub' needs the generator", "safetensors"),
    "--run run --out missing/x.pt2": ("--out", "must lie in a directory, got 'missing/x.pt2'", "make the directory"),
    "--run run --out x --network discriminator --ema": ("--ema", "which only the generator has", "use --live"),
    "--run run --out x --network discriminator --standing": ("--standing", "needs the generator,", "remove the option"),
    "--run run --out x --no-standing --batch 7": ("--batch", "7 needs standing statistics", "remove the option"),
    "--run run --out x --format universal --batch 7": ("--batch", "cannot be combined with --format", "remove the"),
    "--run run --out x.onnx --format safetensors": ("--out", "must not end in .onnx with --format", ".safe"),
    "--run run --out x --no-standing --truncation 1": ("--truncation", "needs standing statistics", "remove the"),
    "--run run --out x --nimg -1": ("--nimg", "must be a saved checkpoint, got -1", "choose from 64"),
    "--run run --out run/checkpoints/000000000064/rank00000.safetensors": ("--out", "safetensors' belongs", "a path"),
}


def test_the_run_itself_is_good(run, capsys):
    assert cli.main(["sample", "--run", "run", "--out", "x.png", "--num", "4", "--truncation", "0.8"]) == 0
    assert cli.main(["export", "--run", "run", "--out", "x.safetensors"]) == 0
    assert Image.open("x.png").size == (2 + 4 * 18, 2 + 18)
    assert Path("x.safetensors").stat().st_size > 1000
    assert {path.name for path in Path().iterdir()} == {"run", "x.png", "x.safetensors"}


@pytest.mark.parametrize("options", SAMPLE)
def test_sample(options, run, capsys):
    check(capsys, ["sample", *options.split()], *SAMPLE[options])


@pytest.mark.parametrize("command", ["sample", "export"])
def test_pipes_are_not_replaced(command, run, capsys):
    os.mkfifo("pipe")
    check(capsys, [command, "--run", "run", "--out", "pipe"], "--out", "must be a regular file, got 'pipe'")
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize("options", EXPORT)
def test_export(options, run, capsys):
    check(capsys, ["export", *options.split()], *EXPORT[options])


def test_an_export_names_the_tensor_that_is_not_finite(run, capsys):
    """Of a checkpoint that an older version took."""
    network = build_network(tiny_recipe(Path()), "discriminator")
    initialize(network, seed=0)
    name = next(iter(network.state_dict()))
    with torch.no_grad():
        network.state_dict()[name].view(-1)[0] = torch.inf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "first_not_finite", lambda tensors: None)
        assert save(run / "checkpoints", 128, {"discriminator": whole(network)}, layout=LAYOUT)
    arguments = ["export", "--run", "run", "--out", "x", "--network", "discriminator"]
    problem = f"'run' has a discriminator at 128 images with non-finite values in {name}"
    check(capsys, arguments, "--run", problem, "--nimg")


def run_out(*arguments: Any) -> None:
    torch.empty(2**52)


SAMPLE_REMEDY = "compute fewer images at a time (--batch 50), or fewer in all (--num)"
EXPORT_REMEDY = "compute fewer images at a time (--batch 50), or none (--no-standing)"
NO_MEMORY: dict[str, tuple[str, ...]] = {
    "sample": ("is not enough with 100 images at a time and 7 in all: ", "can't allocate memory", f"; {SAMPLE_REMEDY}"),
    "export": ("is not enough while the generator is exported: ", "can't allocate memory", f"; {EXPORT_REMEDY}"),
    "export --no-standing": ("is not enough while the generator is exported: ", "; use a machine with more memory"),
}


@pytest.mark.parametrize("command", NO_MEMORY)
def test_running_out_of_memory_without_training(command, run, monkeypatch, capsys):
    monkeypatch.setattr(sample, "_make_sheet", run_out)
    monkeypatch.setattr(export, "open_trained", run_out)
    name, *options = command.split()
    options += ["--num", "7"] if name == "sample" else []
    check(capsys, [name, *options, "--run", "run", "--out", "x"], "memory: ", *NO_MEMORY[command])


def test_classes_of_a_run_without_classes():
    with pytest.raises(UserError, match=r"^--classes: needs a run with classes; remove the option$"):
        choose_columns(Data(num_classes=0), ["0"], 100)
