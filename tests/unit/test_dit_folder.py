"""A DiT as a pipeline of diffusers: the folder's images are those of `bigsgan sample`'s network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from bigsgan import cli
from bigsgan.doctor.games import FLOW
from bigsgan.inference.trained import open_trained
from bigsgan.models import noise
from tests.autoencoders import save_autoencoder
from tests.runs import make_run
from tests.tiny import TINY_GAMES

diffusers = pytest.importorskip("diffusers")

CPU = torch.device("cpu")
DATA = "data={kind: synthetic, resolution: 8, num_images: 64, num_classes: 3, image_channels: 3}"
TIMED = "generator={{family: dit, latent_size: 192, depth: 2, width: 16, heads: 2, times: true, {}}}"
LABELS = [2, 0, 1, 2]
GAMES = {
    "flow": [DATA, TIMED.format("steps: 3, time_shift: 2"), *FLOW[2:]],
    "SiT's times": [DATA, TIMED.format("steps: 2, time_scale: 1"), *FLOW[2:]],
    "fresh noise": [DATA, TIMED.format("steps: 3, sampler: sde"), *FLOW[2:]],
    "guidance": [
        "data={kind: folder, root: unread, resolution: 8, num_classes: 3, image_channels: 3, missing_labels: accept,"
        " condition_dropout: 0.1}",
        TIMED.format("steps: 2, guidance: 1.7"),
        *FLOW[2:],
    ],
    "no classes": [DATA.replace("num_classes: 3", "num_classes: 0"), TIMED.format("steps: 2"), *FLOW[2:]],
    "one step": [DATA, TIMED.format("steps: 1").replace("times: true, steps: 1", "patch: 4"), *TINY_GAMES["dit"][2:]],
}


def export(run: Path, out: Path, *more: str) -> int:
    return cli.main(["export", "--run", str(run), "--out", str(out), "--format", "diffusers", *more])


@pytest.mark.parametrize("name", GAMES)
def test_a_folder_makes_the_same_images(tmp_path, name):
    run, _ = make_run(tmp_path, *GAMES[name])
    out = tmp_path / "folder"
    assert export(run, out) == 0
    trained = open_trained(run, "generator", live=False, nimg=None, device=CPU)
    z, seeds = torch.randn(4, 192, generator=torch.Generator().manual_seed(3)), torch.arange(4)
    labels = torch.tensor(LABELS)
    if trained.recipe.data.has_vectors:
        labels = torch.eye(3)[labels]
    elif not trained.recipe.data.num_classes:
        labels = 0 * labels
    ours = trained.infer((z, labels, *((seeds,) if trained.recipe.generator.seeds_samples else ())))

    pipe = diffusers.DiffusionPipeline.from_pretrained(out, trust_remote_code=True)
    assert pipe.vae is None
    drawn = [noise.normal(seeds, 2**33 + step, (3, 8, 8)) for step in range(3)]
    scheduler = sys.modules[type(pipe.scheduler).__module__]
    with mock.patch.object(scheduler, "randn_tensor", side_effect=drawn):
        classes = LABELS if trained.recipe.data.num_classes else [0] * 4
        theirs = pipe(classes, latents=z.view(4, 3, 8, 8), output_type="latent").images
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
    images = pipe(LABELS[:1] if trained.recipe.data.num_classes else [0], generator=torch.Generator().manual_seed(0))
    assert images.images[0].size == (8, 8)


def test_an_autoencoder_goes_with_it(tmp_path):
    vae = save_autoencoder(tmp_path / "vae")
    codec = f"codec: {{kind: diffusers, path: {tmp_path / 'vae'}, scale: 0.3}}"  # not the folder's 0.5
    data = f"data={{kind: latents, root: {tmp_path}, resolution: 64, num_classes: 3, image_channels: 3, {codec}}}"
    generator = TIMED.format("steps: 2").replace("192", "256")
    run, _ = make_run(tmp_path, data, generator, *FLOW[2:])
    out = tmp_path / "folder"
    assert export(run, out, "--steps", "3") == 0
    pipe = diffusers.DiffusionPipeline.from_pretrained(out, trust_remote_code=True)
    assert pipe.config.steps == 3
    z = torch.randn(1, 4, 8, 8)
    made = pipe([1], latents=z, output_type="latent").images
    shown = pipe([1], latents=z, output_type="pt").images
    with torch.no_grad():
        expected = vae.decode(made / 0.3).sample
    torch.testing.assert_close(shown, (expected / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-4)
    assert json.loads((out / "model_index.json").read_text())["_class_name"] == ["pipeline", "FlowPipeline"]


REFUSED = {
    "needs square images": FLOW,
    "needs data.codec.kind=pixels or diffusers": [DATA, *GAMES["flow"][1:], "data.codec={kind: dct, block: 2}"],
    "needs images of 1 or 3 channels": [
        DATA.replace("image_channels: 3", "image_channels: 4"),
        TIMED.format("steps: 2").replace("192", "256"),
        *FLOW[2:],
    ],
    "needs classes, or no labels": [DATA, *GAMES["flow"][1:], "data.condition_size=2"],
}


@pytest.mark.parametrize("name, steps", [("flow", 0), ("one step", 4)])
def test_steps_that_a_folder_cannot_take_are_refused(tmp_path, name, steps):
    run, _ = make_run(tmp_path, *GAMES[name])
    assert export(run, tmp_path / "folder") == 0
    pipe = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    with pytest.raises(ValueError, match=f"num_inference_steps must be .*1, got {steps}"):
        pipe([0], num_inference_steps=steps)


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_folder_cannot_hold_is_refused(tmp_path, capsys, message):
    run, _ = make_run(tmp_path, *REFUSED[message])
    assert export(run, tmp_path / "folder") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
