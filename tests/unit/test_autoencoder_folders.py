"""A trained autoencoder as a folder of diffusers: what is written, what reads it, and the way back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from bigsgan import cli
from bigsgan.config import load_recipe
from bigsgan.data.build import build_dataset
from bigsgan.data.datasets import readable_images
from bigsgan.inference.trained import open_trained
from bigsgan.weights.diffusers_autoencoder import names
from tests import REPOSITORY
from tests.runs import make_run
from tests.tiny import TINY_GAMES

diffusers = pytest.importorskip("diffusers")

CPU = torch.device("cpu")
VQ = [option.replace("num_codes: 16", "num_codes: 16, normalized: false") for option in TINY_GAMES["autoencoder_vq"]]


def export(run: Path, out: Path, *more: str) -> int:
    return cli.main(["export", "--run", str(run), "--out", str(out), "--format", "diffusers", *more])


def refused(capsys: Any, *command: str) -> str:
    assert cli.main([*command]) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize("game, name", [("kl", "AutoencoderKL"), ("vq", "VQModel")])
def test_there_and_back_again(tmp_path, capsys, monkeypatch, game, name):
    run, _ = make_run(tmp_path, *(TINY_GAMES["autoencoder"] if game == "kl" else VQ))
    out, back = tmp_path / "folder", tmp_path / "back"
    assert export(run, out) == 0
    said = capsys.readouterr().out
    trained = open_trained(run, "generator", live=False, nimg=None, device=CPU)
    theirs = getattr(diffusers, name).from_pretrained(out).eval()
    images = readable_images(build_dataset(trained.recipe.data), trained.recipe.data, 8)
    seeds = [torch.arange(8)] if game == "kl" else []
    made = trained.network.eval().fold(images, torch.zeros(8, dtype=torch.int64), *seeds)[0]
    torch.testing.assert_close(made, theirs(images).sample, rtol=0, atol=1e-5)
    assert f"{name} of diffusers" in said
    if game == "kl":
        images = readable_images(build_dataset(trained.recipe.data), trained.recipe.data, 1024)
        drawn = theirs.encode(images).latent_dist.sample()
        assert theirs.config.scaling_factor == pytest.approx(1 / float(drawn.std()), rel=0.02)
        assert theirs.config.shift_factor == pytest.approx(float(drawn.mean()), abs=0.02 * float(drawn.std()))
        assert f"deviation {1 / theirs.config.scaling_factor:.3g}" in said

    assert cli.main(["import", "--from", "diffusers", "--weights", str(out), "--out", str(back)]) == 0
    ours, again = (open_trained(path, "generator", live=True, nimg=None, device=CPU) for path in (run, back))
    for field in ("channels", "multipliers", "num_blocks", "attention", "norm_groups", "latent_channels", "bottleneck"):
        assert getattr(again.recipe.generator, field) == getattr(ours.recipe.generator, field)
    assert again.recipe.data.image_channels == 1
    ema = open_trained(run, "generator", live=False, nimg=None, device=CPU).network.state_dict()
    printed = capsys.readouterr().out
    for key, tensor in again.network.state_dict().items():
        torch.testing.assert_close(tensor, ema[key], rtol=0, atol=0)
    assert f"the nearest to {again.recipe.data.resolution} " in printed
    if game == "kl":
        assert again.recipe.objective.l1 == again.recipe.objective.perceptual.weight == 16 * 16
        assert "objective.l1=256, the numbers of an image" in printed

    monkeypatch.chdir(tmp_path)  # an import names the shipped recipe's data, which is not here
    assert export(back, tmp_path / "again") == 0
    assert ("scaling_factor 1, as its latents were not measured" in capsys.readouterr().out) == (game == "kl")
    once, twice = (getattr(diffusers, name).from_pretrained(path).state_dict() for path in (out, tmp_path / "again"))
    assert once.keys() == twice.keys()
    assert all(torch.equal(once[key], twice[key]) for key in once)


@pytest.mark.slow
def test_a_codec_reads_it_at_once(tmp_path, capsys):
    run, _ = make_run(tmp_path, *TINY_GAMES["autoencoder"])
    assert export(run, tmp_path / "folder") == 0
    digits = tmp_path / "digits"
    digits.mkdir()
    for i in range(16):
        Image.new("L", (16, 16), 15 * i).save(digits / f"{i}.png")
    command = ["data", "encode", str(digits), str(tmp_path / "latents"), "--codec", f"diffusers:{tmp_path / 'folder'}"]
    said = refused(capsys, *command, "--resolution", "16")
    assert "is of images with 1 channels, not 3; add --grey" in said
    assert cli.main([*command, "--resolution", "16", "--grey"]) == 0
    (overrides,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data.kind=latents")]
    options = [f"out={tmp_path / 'latent'}", "batch=8", "metrics=null", *overrides.split()]
    options += ["total_nimg=16", "report_nimg=8", "sample_nimg=16", "checkpoint_nimg=16"]
    assert cli.main(["train", "--config", "digits_dcgan", *options]) == 0
    with Image.open(next((tmp_path / "latent" / "samples").glob("*_000000000016.png"))) as sheet:  # decoded images
        assert sheet.mode == "L"


@pytest.mark.slow
def test_what_was_frozen_trains_again(tmp_path):
    run, _ = make_run(tmp_path, *TINY_GAMES["autoencoder"])
    frozen = ["generator.frozen=encoder", "objective.kl=0", f"init_from.run={run}"]
    times = ["total_nimg=16", "report_nimg=8", "sample_nimg=16", "checkpoint_nimg=16"]
    again = [f"init_from.run={tmp_path / 'frozen'}", "generator.frozen=none"]
    found = {}
    for name, source, options in (("frozen", run, frozen), ("again", tmp_path / "frozen", again)):
        options = ["--config", str(source / "config.yaml"), f"out={tmp_path / name}", *options, *times]
        subprocess.run([sys.executable, REPOSITORY / "launch" / "train.py", *options], check=True, timeout=120)
        found[name] = open_trained(tmp_path / name, "generator", live=True, nimg=None, device=CPU).network.state_dict()
    begun = open_trained(run, "generator", live=False, nimg=None, device=CPU).network.state_dict()
    for name, value in begun.items():
        if name.endswith("weight"):
            assert torch.equal(found["frozen"][name], value) == (int(name.split(".")[1]) < 8), name
            assert not torch.equal(found["again"][name], found["frozen"][name]), name


def test_a_published_one_without_maps_to_latents_is_read(tmp_path, capsys):
    sizes = {"block_out_channels": [8, 8], "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    theirs = diffusers.AutoencoderKL(**sizes, **kinds, use_quant_conv=False, use_post_quant_conv=False)
    theirs.save_pretrained(tmp_path / "folder")
    command = ["import", "--from", "diffusers", "--weights", str(tmp_path / "folder"), "--out", str(tmp_path / "run")]
    assert cli.main(command) == 0
    trained = open_trained(tmp_path / "run", "generator", live=True, nimg=None, device=CPU)
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    made = trained.network.eval().fold(images, torch.zeros(2, dtype=torch.int64), torch.arange(2))[0]
    torch.testing.assert_close(made, theirs(images).sample, rtol=0, atol=1e-5)
    recipe = load_recipe(tmp_path / "run" / "config.yaml", [])
    assert recipe.discriminator.family == "autoencoder"
    assert recipe.discriminator.channels == 64  # the shipped recipe's
    assert names(trained.recipe.generator).keys() == dict(trained.network.named_parameters()).keys()


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    run, _ = make_run(tmp_path, *TINY_GAMES["autoencoder"])
    folder, command = tmp_path / "folder", ["export", "--run", str(run), "--format", "diffusers", "--out"]
    assert export(run, folder) == 0
    assert "--out" in refused(capsys, *command, str(folder))
    for option in (["--dtype", "bf16"], ["--truncation", "0.5"]):
        said = refused(capsys, *command, str(tmp_path / "other"), *option)
        assert f"{option[0]}: cannot be combined with --format diffusers" in said
    (tmp_path / "mlp").mkdir(), (tmp_path / "autoencoder_vq").mkdir()
    for game, said in (
        ("autoencoder_vq", "generator.bottleneck.normalized=false"),
        ("mlp", "generator.family=autoenc"),
    ):
        other, _ = make_run(tmp_path / game, *TINY_GAMES[game])
        asked = ["export", "--run", str(other), "--format", "diffusers", "--out", str(tmp_path / "x")]
        assert f"--format: 'diffusers' needs {said}" in refused(capsys, *asked)
    assert not (tmp_path / "x").exists()

    command = ["import", "--from", "diffusers", "--out", str(tmp_path / "made"), "--weights"]
    assert "config.json" in refused(capsys, *command, str(tmp_path))
    assert "--settings: is not supported" in refused(capsys, *command, str(folder), "--settings", "none")
    for key, value, said in (
        ("act_fn", "gelu", 'has act_fn "gelu"'),
        ("block_out_channels", [4, 6], "has block_out_channels [4, 6]"),
        ("down_block_types", ["DownBlock2D"] * 2, "has down_block_types"),
        ("_class_name", "AutoencoderDC", "is of the class AutoencoderDC"),
        ("block_out_channels", 3, "cannot be read as an autoencoder of diffusers"),
        ("block_out_channels", [0, 8], "has block_out_channels [0, 8]"),
        ("up_block_types", ["AttnUpDecoderBlock2D", "UpDecoderBlock2D"], "has up_block_types"),
        ("out_channels", 2, "has out_channels 2"),
        ("sample_size", [16, 24], "has sample_size [16, 24]"),
    ):
        changed = tmp_path / "changed"
        shutil.copytree(folder, changed)
        config = json.loads((changed / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps({**config, key: value}))
        assert said in refused(capsys, *command, str(changed))
        shutil.rmtree(changed)
    assert load_file(folder / "diffusion_pytorch_model.safetensors")
    assert not (tmp_path / "made").exists()
