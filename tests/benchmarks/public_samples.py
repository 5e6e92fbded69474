"""Opens what `bigsgan export` writes for public classes in these classes, and compares their images with its own.

    python -m tests.benchmarks.public_samples FORM CLONE [dotted.key=value ...]

FORM is a format such as biggan-pytorch, and CLONE a directory with that project's code, which is used as it is; GAT's
needs timm and einops. A tiny network is trained for four updates of 8 images and exported, the module is made by the
call that the export prints, and the state dict is loaded strictly. Printed: the largest difference of a pixel, and the
largest pixel; and of the discriminator's logits of the same images.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import parse
from torch import Tensor, nn

import bigsgan
from bigsgan import cli
from bigsgan.config import Recipe
from bigsgan.inference.sheets import set_styles
from tests.tiny import tiny_recipe

_R3GAN = "family: r3gan, embedding_size: 6, widths: [8, 8, 4], cardinalities: [4, 2, 2], blocks: [1, 2, 1]"
_GAT = "family: gat, width: 16, heads: 2, patch: 4, levels: 4, depth: 4"
_STYLES = "family: stylegan2, mapping_layers: 2, channel_base: 64, channel_max: 8"
_COLOURS = "data={kind: synthetic, num_images: 64, image_channels: 3, num_classes: 10, resolution: %d}"
GAMES = {
    "biggan-pytorch": [
        _COLOURS % 32,
        "generator={channels: 4, latent_size: 12, embedding_size: 6, attention: [16]}",
        "discriminator={channels: 4}",
    ],
    "stylegan2-ada": [
        _COLOURS % 16,
        f"generator={{latent_size: 8, w_size: 8, {_STYLES}}}",
        f"discriminator={{{_STYLES}, mbstd_group: 2}}",
    ],
    "r3gan": [_COLOURS % 16, f"generator={{latent_size: 12, {_R3GAN}}}", f"discriminator={{{_R3GAN}}}"],
    "gat": [
        _COLOURS % 16,
        f"generator={{latent_size: 6, embedding_size: 6, {_GAT}}}",
        f"discriminator={{embedding_size: 8, {_GAT}}}",
        "objective={loss: relativistic}",
    ],
    "pix2pix": [
        "data={kind: synthetic_pairs, resolution: 64, num_images: 64, num_classes: 0, image_channels: 3}",
        "generator={family: pix2pix, channels: 4}",
        "discriminator={family: pix2pix, channels: 4, depth: 2}",
        "objective={loss: non_saturating, l1: 10, reuse_fakes: true}",
    ],
}


def exported(run: Path, form: str, network: str) -> nn.Module:
    """The public module with the run's network."""
    file, said = run.parent / f"{network}.pth", io.StringIO()
    with redirect_stdout(said):
        arguments = ["export", "--run", str(run), "--format", form, "--network", network, "--out", str(file)]
        assert cli.main([*arguments, *(["--no-standing"] if network == "generator" else [])]) == 0
    text = said.getvalue().rpartition("open: ")[2]
    path = text.partition("(")[0].rpartition(".")[0]
    module: Any = importlib.import_module(path)
    space = {path.partition(".")[0]: sys.modules[path.partition(".")[0]], path: module}
    made: nn.Module = eval(text, space)
    made.load_state_dict(torch.load(file, weights_only=True), strict=True)
    print(text.strip())
    return made.eval()


def made(form: str, generator: Any, first: Tensor, labels: Tensor) -> Tensor:
    """Images of the public generator."""
    with torch.no_grad():
        if form == "biggan-pytorch":
            return generator(first, generator.shared(labels))
        if form == "pix2pix":
            return generator(first)
        if form == "gat":
            side = generator.input_size
            return generator(torch.zeros(len(first), generator.in_channels, side, side), labels, first)
        more = {"noise_mode": "const"} if form == "stylegan2-ada" else {}
        return generator(first, F.one_hot(labels, 10).float(), **more)


def judged(form: str, discriminator: Any, images: Tensor, labels: Tensor, first: Tensor) -> Tensor | None:
    """Logits of the public discriminator; None where noise that it draws itself comes before it, as GAT's."""
    with torch.no_grad():
        if form == "gat":
            return None
        if form == "pix2pix":
            return discriminator(torch.cat([first, images], dim=1))
        return discriminator(images, labels if form == "biggan-pytorch" else F.one_hot(labels, 10).float())


def inputs(recipe: Recipe, num: int = 4) -> tuple[Tensor, Tensor]:
    """Latents or input images, and classes."""
    generator = torch.Generator().manual_seed(1)
    if recipe.translates:
        shape = (num, recipe.input_channels, *recipe.data.network_size)
        return torch.rand(shape, generator=generator) * 2 - 1, torch.zeros(num, dtype=torch.int64)
    return torch.randn(num, recipe.latent_size, generator=generator), torch.arange(num)


def main(form: str, clone: str, overrides: list[str]) -> None:
    """Train, export, open and compare."""
    sys.path[:0] = [clone, os.path.join(clone, "models")] if form == "pix2pix" else [clone]
    versions: Any = sys.modules.setdefault("pkg_resources", ModuleType("pkg_resources"))  # gone from setuptools
    versions.parse_version = parse
    place = Path(tempfile.mkdtemp())
    recipe = tiny_recipe(place, *GAMES[form], "total_nimg=32", "checkpoint_nimg=32", *overrides)
    bigsgan.train(recipe)
    run = Path(recipe.out)
    for network in ("generator", "discriminator"):
        arguments = ["export", "--run", str(run), "--network", network, "--out", str(place / network)]
        assert cli.main([*arguments, *(["--no-standing"] if network == "generator" else [])]) == 0
    ours = [bigsgan.load(place / network) for network in ("generator", "discriminator")]
    theirs = [exported(run, form, network) for network in ("generator", "discriminator")]
    first, labels = inputs(recipe)
    with torch.no_grad():
        if form == "stylegan2-ada":
            set_styles(ours[0].network, "const", None)
        images = ours[0](first, labels)
        print(f"images: {(made(form, theirs[0], first, labels) - images).abs().max():.1e} of {images.abs().max():.2g}")
        images, labels, first = images[:2], labels[:2], first[:2]  # one group of StyleGAN2's, whose order differs
        logits = judged(form, theirs[1], images, labels, first)
        if logits is not None:
            own = ours[1](images, labels, *([first] if recipe.translates else []))
            print(f"logits: {(logits.flatten() - own.flatten()).abs().max():.1e} of {own.abs().max():.2g}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
