"""`bigsgan import`: a run directory from published weights, which samples, exports and trains on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bigsgan import checkpoint, shipped
from bigsgan.config import NETWORKS, Recipe, parse_recipe, plan_run
from bigsgan.config.run_directory import RECIPE_FILE, refuse_directory, write_recipe
from bigsgan.config.sections import Checkpoints
from bigsgan.config.yaml_file import read_yaml
from bigsgan.errors import UserError
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from bigsgan.weights.sources import Found, read_source

# Recipes that ship for a family, with whose settings imported networks train on until the user says otherwise.
_RECIPES = {
    "biggan": ("biggan128_imagenet", "biggan256_imagenet", "biggan512_imagenet"),
    "biggan_deep": ("biggan_deep128_imagenet", "biggan_deep256_imagenet"),
    "stylegan2": ("stylegan2_cifar", "stylegan2_256", "stylegan2_512", "stylegan2_1024"),
    "r3gan": ("r3gan_cifar10", "r3gan_imagenet32", "r3gan_ffhq64", "r3gan_imagenet64", "r3gan_ffhq256"),
    "pix2pix": ("pix2pix_facades",),
}

_SIZES = ("channels", "depth", "channel_base", "channel_max", "widths", "cardinalities", "blocks", "expansion", "norm")


def main(source: str, weights: Path, discriminator: Path | None, out: Path, norm_eps: float | None = None) -> None:
    """Write a run directory at the images seen that a snapshot's name tells, else at 0.

    Where there is no discriminator, training on begins with a new one.

    Raises:
        UserError: The files cannot be read or hold something else, or ``out`` is in use.
    """
    if os.path.lexists(out / RECIPE_FILE):
        raise UserError("--out", str(out), "holds a run already", "give another directory")
    refuse_directory(out, "--out")
    found = read_source(source, weights, discriminator, norm_eps)
    nimg = _images_seen(weights)
    name, recipe = make_recipe(found, out, nimg)
    entries = {name: _Entry(recipe, name, state) for name, state in found.states.items()}
    write_recipe(recipe, out, plan_run(recipe, 1).deepspeed_files)
    saver = checkpoint.Saver(out / "checkpoints", checkpoint.OneRank(), Checkpoints(background=False))
    if not saver.save(nimg, entries, checkpoint.Description(recipe.model_dump(), {checkpoint.IMPORTED: source}, {})):
        raise UserError("--out", str(out), "could not be written (the warnings above say why)", "make room")
    numel = sum(tensor.numel() for tensor in found.states["generator"].values()) / 1e6
    also = "and its discriminator" if "discriminator" in entries else "without a discriminator"
    print(f"{out}: a {recipe.generator.family} generator of {numel:.2f} M numbers, {also}")
    print(_settings(name, recipe, nimg))
    print(f"look at it:    bigsgan sample --run {out} --out samples.png")
    print(f"train on:      {shipped.train_command()} --config {out / RECIPE_FILE} data.root=...")


def make_recipe(found: Found, out: Path, nimg: int = 0) -> tuple[str, Recipe]:
    """The recipe that comes closest by family, resolution and classes, with the networks that the weights fit.

    Args:
        found: The weights.
        out: The run directory.
        nimg: Images that the weights had seen, where that is known.

    Returns:
        The name of the recipe whose settings were taken, and the recipe.
    """
    family = found.sections["generator"]["family"]
    trees = {name: read_yaml(shipped.recipe(name)) for name in _RECIPES[family]}
    name = min(trees, key=lambda name: _distance(trees[name]["data"], found.data))
    tree = trees[name]
    tree["out"] = str(out)
    if "crop_from" in tree["data"]:
        tree["data"]["crop_from"] = tree["data"]["crop_from"] * found.data["resolution"] // tree["data"]["resolution"]
    tree["data"].update(found.data)
    kept = {"style_mixing": tree["generator"]["style_mixing"]} if "style_mixing" in tree["generator"] else {}
    for network in NETWORKS:
        tree[network] = found.sections.get(network) or _partner(found.sections["generator"])
    tree["generator"] = {**kept, **tree["generator"]}
    if found.augmentation_p is not None and "target" in tree.get("augmentation", {}):
        tree["augmentation"]["p"] = found.augmentation_p
    if nimg >= tree["total_nimg"]:
        tree["total_nimg"] = 2 * nimg
    if (
        not nimg
    ):  # the average is an old one, though no image is counted: what shortens a young one's memory is left out
        tree["ema"] = {"half_life_nimg": tree["ema"]["half_life_nimg"]}
    return name, parse_recipe(tree)


def _distance(data: dict[str, Any], found: dict[str, Any]) -> tuple[float, bool, int]:
    """How far a recipe's images are from those found: first by resolution, then by classes."""
    classes, found_classes = data.get("num_classes", 0), found.get("num_classes", 0)
    apart = abs(math.log2(data["resolution"] / found["resolution"]))
    return apart, bool(classes) != bool(found_classes), abs(classes - found_classes)


def _images_seen(weights: Path) -> int:
    """Images that a snapshot's name tells, as NVIDIA's and R3GAN's training loops write it; else 0."""
    found = re.fullmatch(r"network-snapshot-([0-9]{6,9})\.pkl", weights.name)
    return 1000 * int(found[1]) if found else 0


def _settings(name: str, recipe: Recipe, nimg: int) -> str:
    """What training on would do, and why."""
    data, objective, ema = recipe.data, recipe.objective, recipe.ema
    r1 = f"R1 {objective.r1.weight}" if objective.r1 else "no R1"
    path_length = f"path length {objective.path_length.weight}" if objective.path_length else "no path length"
    lr = f"learning rates {recipe.optimizer.generator.lr} and {recipe.optimizer.discriminator.lr}"
    augmentation = (
        f", augmentation at p {recipe.augmentation.p:g}"
        if recipe.augmentation and recipe.augmentation.target is not None
        else ""
    )
    seen = f"{nimg} images seen (from the file's name)" if nimg else "images seen are not known: counted from 0"
    return "\n".join(
        [
            f"settings:      launch/recipes/{name}.yaml, the nearest to {data.resolution}x{data.resolution} "
            f"and {data.num_classes} classes; settings in the file are not read",
            f"               {r1}, {path_length}, {lr}, EMA half-life {ema.half_life_nimg}",
            f"               {seen}; the EMA is kept, optimizers begin anew{augmentation}",
        ]
    )


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
