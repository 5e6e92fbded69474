"""`bigsgan import`: a run directory from published weights, which samples, exports and trains on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bigsgan import checkpoint
from bigsgan.config import NETWORKS, Recipe, parse_recipe, plan_run
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.config.run_directory import RECIPE_FILE, write_recipe
from bigsgan.config.sections import Checkpoints
from bigsgan.config.yaml_file import read_yaml
from bigsgan.errors import UserError
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from bigsgan.weights.sources import Found, read_source

# Whose training a family's imported networks go on with, until the user says otherwise.
_RECIPES = {
    "biggan": "biggan128_imagenet",
    "biggan_deep": "biggan_deep128_imagenet",
    "stylegan2": "stylegan2_256",
    "r3gan": "r3gan_ffhq64",
    "pix2pix": "pix2pix_facades",
}

_SIZES = ("channels", "depth", "channel_base", "channel_max", "widths", "cardinalities", "blocks", "expansion", "norm")


def main(source: str, weights: Path, discriminator: Path | None, out: Path, norm_eps: float | None = None) -> None:
    """Write a run directory at 0 images seen. Where there is no discriminator, training on begins with a new one.

    Raises:
        UserError: The files cannot be read or hold something else, or ``out`` is in use.
    """
    if os.path.lexists(out / RECIPE_FILE):
        raise UserError("--out", str(out), "holds a run already", "give another directory")
    found = read_source(source, weights, discriminator, norm_eps)
    recipe = make_recipe(found, out)
    entries = {name: _Entry(recipe, name, state) for name, state in found.states.items()}
    write_recipe(recipe, out, plan_run(recipe, 1).deepspeed_files)
    saver = checkpoint.Saver(out / "checkpoints", checkpoint.OneRank(), Checkpoints(background=False))
    if not saver.save(0, entries, checkpoint.Description(recipe.model_dump(), {checkpoint.IMPORTED: source}, {})):
        raise UserError("--out", str(out), "could not be written (the warnings above say why)", "make room")
    numel = sum(tensor.numel() for tensor in found.states["generator"].values()) / 1e6
    also = "and its discriminator" if "discriminator" in entries else "without a discriminator"
    print(f"{out}: a {recipe.generator.family} generator of {numel:.2f} M numbers, {also}")
    print(f"look at it:    bigsgan sample --run {out} --out samples.png")
    print(f"train on:      deepspeed launch/train.py --config {out / RECIPE_FILE} data.root=...")


def make_recipe(found: Found, out: Path) -> Recipe:
    """The recipe of the family that comes closest, with the networks and images that the weights fit."""
    family = found.sections["generator"]["family"]
    tree = read_yaml(REPOSITORY / "launch" / "recipes" / f"{_RECIPES[family]}.yaml")
    tree["out"] = str(out)
    if "crop_from" in tree["data"]:
        tree["data"]["crop_from"] = tree["data"]["crop_from"] * found.data["resolution"] // tree["data"]["resolution"]
    tree["data"].update(found.data)
    for network in NETWORKS:
        tree[network] = found.sections.get(network) or _partner(found.sections["generator"])
    return parse_recipe(tree)


def _partner(generator: dict[str, Any]) -> dict[str, Any]:
    """Section of a discriminator without weights, of the generator's widths; attention is left to the user."""
    return {key: generator[key] for key in ("family", *_SIZES) if key in generator}


class _Entry:
    """Parameters and buffers of one network, whole, as an entry of a checkpoint."""

    def __init__(self, recipe: Recipe, name: str, state: Mapping[str, Tensor]) -> None:
        network = "discriminator" if name == "discriminator" else "generator"
        stack = build_network(recipe, network)
        initialize(stack, initial_seed(recipe, network))
        wanted = {key: tensor.shape for key, tensor in stack.state_dict().items()}
        missing = {key for key, _ in stack.named_parameters()} - state.keys()
        other = {key for key, tensor in state.items() if tensor.shape != wanted.get(key)}
        if other or missing:
            field = "--discriminator" if network == "discriminator" else "--weights"
            problem = f"does not fit the generator's images and classes, or is not whole ({min(other | missing)})"
            raise UserError(field, None, problem, "give the two networks of one training")
        stack.load_state_dict(dict(state), strict=False)
        self._parameters, self._buffers = dict(stack.named_parameters()), dict(stack.named_buffers())

    def parts(self) -> list[checkpoint.Part]:
        """Float32 parameters, and buffers."""
        masters = [checkpoint.Part("master", n, 0, p.detach().float().flatten()) for n, p in self._parameters.items()]
        return masters + [checkpoint.Part("buffer", n, 0, b.flatten()) for n, b in self._buffers.items()]

    def numbers(self) -> dict[str, float]:
        """Return none."""
        return {}
