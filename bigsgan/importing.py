"""`bigsgan import`: makes a run directory from published weights, for sampling, exporting and further training."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from bigsgan import checkpoint, shipped
from bigsgan.checkpoint import BUFFER, MASTER, STEP
from bigsgan.checkpoint.exported import Exported
from bigsgan.checkpoint.files import first_not_finite
from bigsgan.config import NETWORKS, Recipe, load_recipe, parse_recipe, plan_run
from bigsgan.config.engine_plan import EnginePlan
from bigsgan.config.run_directory import RECIPE_FILE, flat, refuse_directory, write_recipe
from bigsgan.config.sections import Checkpoints, Optimizer
from bigsgan.config.yaml_file import apply_override, apply_overrides, read_yaml
from bigsgan.errors import UserError, counted
from bigsgan.models.build import build_network, initial_seed, network_on_meta
from bigsgan.models.network import initialize
from bigsgan.runtime.atomic import leaving_nothing
from bigsgan.weights.optimizer_state import Moments
from bigsgan.weights.settings import checked
from bigsgan.weights.sources import Found, read_source
from bigsgan.weights.universal import Folder, Universal, open_network, read_network

# Shipped recipes of a family. Imported networks train on with the settings of one, unless the user changes them.
_RECIPES = {
    "biggan": ("biggan128_imagenet", "biggan256_imagenet", "biggan512_imagenet"),
    "biggan_deep": ("biggan_deep128_imagenet", "biggan_deep256_imagenet"),
    "stylegan2": ("stylegan2_cifar", "stylegan2_256", "stylegan2_512", "stylegan2_1024"),
    "r3gan": ("r3gan_cifar10", "r3gan_imagenet32", "r3gan_ffhq64", "r3gan_imagenet64", "r3gan_ffhq256"),
    "gat": ("gat_b_imagenet256",),
    "dit": ("sit_xl_imagenet256",),
    "pix2pix": ("pix2pix_facades",),
    "autoencoder": ("sdvae_f8_imagenet256", "llamagen_vq16_imagenet256"),
}

_LEARNING = (
    *("batch", "accumulation", "total_nimg", "objective", "augmentation", "optimizer", "ema", "data.horizontal_flip"),
    *("generator.style_mixing", "generator.bf16", "discriminator.bf16"),
)
"""Beginnings of keys that change what is learnt; an import prints these."""

_MOST_NIMG = 10**12
"""Checkpoints are named after images in twelve digits."""

_MOST_NAMES = 60

OPTIONS = {"generator": "--weights", "discriminator": "--discriminator"}
"""The options with the networks' files."""

_SIZES = (
    *("channels", "depth", "channel_base", "channel_max", "widths", "cardinalities", "blocks", "expansion", "norm"),
    *("width", "heads", "patch", "levels"),
)
"""Keys of a generator that a discriminator without weights takes over."""

_UNTOLD = ("style_mixing", "bf16", "steps")
"""Keys of a network that weights do not tell, and that a shipped recipe may have."""


def main(
    source: str,
    weights: Path,
    discriminator: Path | None,
    out: Path,
    norm_eps: float | None = None,
    settings_file: str | None = None,
) -> None:
    """Write a run directory with one checkpoint, at the images seen that a snapshot or its name tells, else at 0.

    Without a discriminator, training starts with a new one.

    Raises:
        UserError: The files cannot be read or contain something else, or ``out`` is in use.
    """
    _check_out(out)
    found = read_source(source, weights, discriminator, norm_eps, settings_file)
    _refuse_not_finite(found, weights, discriminator)
    in_name = _images_in_name(weights)
    nimg = found.nimg if found.nimg is not None else in_name
    if nimg >= _MOST_NIMG:
        problem = f"must have seen fewer than {_MOST_NIMG} images"
        raise UserError("--weights", str(weights), problem, "give another file", f"it says {nimg}")
    recipe, chosen = make_recipe(found, out, nimg)
    engines = checked(found.settings, lambda: plan_run(recipe, 1).engines)
    entries = {name: _Entry(recipe, name, state, found.moments.get(name)) for name, state in found.states.items()}
    _write(recipe, engines, out, entries, source, nimg)
    numel = sum(tensor.numel() for tensor in found.states["generator"].values()) / 1e6
    also = "and its discriminator" if "discriminator" in entries else "without a discriminator"
    article = "an" if recipe.generator.family[0] in "aeiou" else "a"
    print(f"{out}: {article} {recipe.generator.family} generator of {numel:.2f} M numbers, {also}")
    print(chosen)
    if found.assumed:
        values = flat(recipe.model_dump())
        keys = {key: values[key] for key in found.assumed if key in values}
        others = [text for text in found.assumed if text not in values]
        lines = ["as nothing in the files tells it:", *_listed(keys), *_wrapped(others)]
        print(_labelled("assumed:", lines))
    print(_state_taken(recipe, found, nimg, bool(in_name)))
    if found.left_out:
        print(_labelled("left out:", found.left_out))
    print(f"sample:        bigsgan sample --run {out} --out samples.png")
    asked = ["data.root=...", *(["objective.teacher.path=..."] if found.teacher else [])]
    if recipe.data.dataset is not None:  # the shipped recipe's, of torchvision
        asked = ["data.kind=folder", "data.dataset=null", *asked]
    print(f"resume:        {shipped.train_command()} --config {out / RECIPE_FILE} {' '.join(asked)}")


def import_exports(source: str, paths: Mapping[str, Path], config: Path | None, changes: list[str], out: Path) -> None:
    """Write a run directory from exports, or universal checkpoints of DeepSpeed, of one network or both.

    Training begins at image 0, a network without a file with random weights, and both with Adam's state if it is there.

    Args:
        source: ``bigsgan`` for exports, or ``universal``.
        paths: By network, its export or universal checkpoint.
        config: The recipe of the networks; None for the one that `bigsgan export` has put into it.
        changes: Overrides of the recipe.
        out: The run directory to make.

    Raises:
        UserError: One cannot be read or is of another network, or ``out`` is in use.
    """
    _check_out(out)
    found = {name: open_network(source, OPTIONS[name], path, name) for name, path in paths.items()}
    recipe = _recipe_for(found, config, changes).model_copy(update={"out": str(out)})
    networks = {name: read_network(each, name, network_on_meta(recipe, name)) for name, each in found.items()}
    entries = {n: _Entry(recipe, n, each.state, each.moments) for n, each in networks.items()}
    if "generator" in networks:
        entries["average"] = _Entry(recipe, "average", networks["generator"].state)
    whole = {n: recipe.engine(n).model_copy(update={"pipeline_stages": 1, "ranks": None}) for n in NETWORKS}
    single = recipe.model_copy(update={"engines": recipe.engines.model_copy(update=whole)})
    _write(recipe, plan_run(single, 1, config.resolve().parent if config else None).engines, out, entries, source, 0)
    for name in NETWORKS:
        print(f"{out}: the {name} {_described(networks.get(name), getattr(recipe.optimizer, name))}")
    print("the EMA begins as a copy of the generator; images are counted from 0")
    print(f"resume:        {shipped.train_command()} --config {out / RECIPE_FILE}")


def _recipe_for(found: Mapping[str, Folder | Exported], config: Path | None, overrides: list[str]) -> Recipe:
    if config is not None:
        return load_recipe(config, overrides)
    trees = [each.told.get("recipe") for each in found.values()]
    tree = next((each for each in trees if isinstance(each, dict)), None)
    if tree is None:
        detail = "the checkpoint does not have it, as `bigsgan export` did not write it"
        raise UserError("--config", None, "must be given", "give the recipe whose networks these are", detail)
    tree = {key: value for key, value in copy.deepcopy(tree).items() if key not in ("engines", "init_from")}
    apply_overrides(tree, overrides)
    return parse_recipe(tree)


def _described(network: Universal | None, optimizer: Optimizer) -> str:
    """Describe what was read of a network."""
    if network is None:
        return "starts from random weights"
    numel = sum(tensor.numel() for tensor in network.state.values())
    kind, why = "Adam" if optimizer.is_adam else optimizer.kind, "the checkpoint's state is Adam's"
    state = f"{kind} starts from zero ({network.without_moments or why})"
    if optimizer.is_adam and network.moments:
        state = f"Adam resumes after {counted(network.moments.steps, 'update')}"
    unknown = network.unknown
    buffers = f"; {len(unknown)} buffers such as {unknown[0]} start anew" if unknown else ""
    if len(unknown) == 1:
        buffers = f"; the buffer {unknown[0]} starts anew"
    return f"has {numel:,} imported numbers; its {state}{buffers}"


def _check_out(out: Path) -> None:
    if os.path.lexists(out / RECIPE_FILE):
        raise UserError("--out", str(out), "contains a run already", "give another directory")
    refuse_directory(out, "--out")


def _write(
    recipe: Recipe, engines: Mapping[str, EnginePlan], out: Path, entries: Mapping[str, _Entry], source: str, nimg: int
) -> None:
    description = checkpoint.Description(recipe.model_dump(), {checkpoint.IMPORTED: source}, {})
    with leaving_nothing(out / "checkpoints", out):  # training would start anew in a run without a checkpoint
        saver = checkpoint.Saver(out / "checkpoints", checkpoint.SingleProcess(), Checkpoints(background=False))
        if not saver.save(nimg, entries, description):
            raise UserError("--out", str(out), "cannot be written", "fix what the warnings above name")
        write_recipe(recipe, out, engines)


def _refuse_not_finite(found: Found, weights: Path, discriminator: Path | None) -> None:
    for name, state in found.states.items():
        if bad := first_not_finite(state):
            of_discriminator = name == "discriminator" and discriminator is not None
            option, path = ("--discriminator", discriminator) if of_discriminator else ("--weights", weights)
            problem = f"contains Inf or NaN ({bad} of the {name})"
            raise UserError(option, str(path), problem, "give other weights, such as an earlier snapshot")


def make_recipe(found: Found, out: Path, nimg: int = 0) -> tuple[Recipe, str]:
    """Return the closest shipped recipe, by family, resolution and classes, with the known settings of the training.

    It is for a run in ``out`` that resumes from ``nimg`` images. Also return a text that says where the settings come
    from.

    Raises:
        UserError: The settings do not make a recipe.
    """
    generator = found.sections["generator"]
    trees = {name: read_yaml(shipped.recipe(name)) for name in _RECIPES[generator["family"]]}
    form = (generator.get("bottleneck") or {}).get("kind")
    same = {n: tree for n, tree in trees.items() if (tree["generator"].get("bottleneck") or {}).get("kind") == form}
    name = min(same, key=lambda name: _distance(trees[name]["data"], found.data))
    tree = trees[name]
    tree["out"], shipped_side = str(out), tree["data"]["resolution"]
    if "crop_from" in tree["data"]:
        tree["data"]["crop_from"] = tree["data"]["crop_from"] * found.data["resolution"] // tree["data"]["resolution"]
    tree["data"].update(found.data)
    if "fake_labels" in tree["objective"] and not tree["data"].get("num_classes"):
        del tree["objective"]["fake_labels"], tree["objective"]["reuse_fakes"]  # which only serves fake_labels
    shared = {key: generator[key] for key in ("levels",) if key in generator}  # a discriminator's shapes do not tell
    partner = {key: generator[key] for key in ("family", *_SIZES) if key in generator}  # attention is left to the user
    if tree["discriminator"]["family"] == "none":
        partner = tree["discriminator"]
    for network in NETWORKS:
        kept = {key: tree[network][key] for key in _UNTOLD if key in tree[network]}
        tree[network] = {**kept, **shared, **found.sections.get(network, partner)}
    settled = flat(tree)
    known = _known_keys(found)
    if found.teacher:  # the weights tell it; no shipped recipe has one
        tree["objective"]["teacher"] = found.teacher
    if "init_from.freeze_discriminator" in known:  # a key of that section, which names a run
        tree["init_from"] = {"run": str(out)}
    for key, value in known.items():
        apply_override(tree, key.split("."), value)
    changed = _fit_groups(tree, known) | _fit_sums(tree, shipped_side)
    _resume_schedules(tree, found, nimg)
    recipe: Recipe = checked(found.settings, lambda: parse_recipe(tree))
    return recipe, _settings(name, recipe, settled, flat(known), found, changed)


def _fit_groups(tree: dict[str, Any], known: Mapping[str, Any]) -> dict[str, str]:
    """Make the batch a multiple of the groups for D's minibatch deviation; return each changed key, and why.

    A group of more images than the batch has is the batch, as in the public code.
    """
    discriminator, batch = tree["discriminator"], tree["batch"]
    group = discriminator.get("mbstd_group")
    size = batch // tree.get("accumulation", 1)
    if group is None or not discriminator.get("mbstd_channels", 1) or size % group == 0:
        return {}
    if group > size:
        discriminator["mbstd_group"] = size
        return {"discriminator.mbstd_group": f"={size}, the images of a micro-batch, instead of {group}"}
    if "batch" in known:  # the recipe's check says what could be changed
        return {}
    shrink = (tree["objective"].get("path_length") or {}).get("batch_shrink", 1)
    multiple = math.lcm(group, shrink) * tree.get("accumulation", 1)
    multiple *= next((num for num in (8, 4, 2) if num * multiple <= batch), 1)  # so many ranks have whole groups too
    tree["batch"] = max(1, round(batch / multiple)) * multiple
    return {"batch": f"={tree['batch']}, a multiple of discriminator.mbstd_group={group}, instead of {batch}"}


def _fit_sums(tree: dict[str, Any], side: int) -> dict[str, str]:
    """Let distances that are sums over an image, at the shipped recipe's side, be sums over the found images."""
    objective, data = tree["objective"], tree["data"]
    share = data["image_channels"] * data["resolution"] ** 2 / (3 * side**2)
    if objective.get("l1") != 3 * side**2 or share == 1:
        return {}
    objective["l1"] *= share
    objective["perceptual"]["weight"] *= share
    why = f"={objective['l1']:g}, the numbers of an image"
    return {"objective.l1": why, "objective.perceptual.weight": why}


def _known_keys(found: Found) -> dict[str, Any]:
    """Keys of a recipe that settings tell; the file's override the snapshot's."""
    keys: dict[str, Any] = {}
    for settings in found.settings:
        for key, value in settings.keys.items():
            if not isinstance(value, Mapping | None):
                keys[key] = value
            else:  # a whole section replaces its keys
                keys = {other: each for other, each in keys.items() if not other.startswith(f"{key}.")} | {key: value}
    return keys


def _resume_schedules(tree: dict[str, Any], found: Found, nimg: int) -> None:
    """Set ADA's p, the duration and the EMA to resume from the snapshot."""
    augmentation = tree.get("augmentation") or {}
    if found.augmentation_p is not None and "final_p" not in augmentation and augmentation:
        apply_override(tree, ["augmentation", "p"], found.augmentation_p)
    if nimg >= tree["total_nimg"]:
        tree["total_nimg"] = 2 * nimg
    if not nimg:
        # The EMA needs no warm-up: it is old, although the count of images starts at 0.
        tree["ema"] = {"half_life_nimg": tree["ema"]["half_life_nimg"]}


def _distance(data: dict[str, Any], found: dict[str, Any]) -> tuple[float, bool, int]:
    """Distance of a recipe's images from the found ones: first by resolution, then by classes."""
    classes, found_classes = data.get("num_classes", 0), found.get("num_classes", 0)
    octaves = abs(math.log2(data["resolution"] / found["resolution"]))
    return octaves, bool(classes) != bool(found_classes), abs(classes - found_classes)


def _images_in_name(weights: Path) -> int:
    """Images seen, from a snapshot's name as NVIDIA's and R3GAN's training loops write it; else 0."""
    found = re.fullmatch(r"network-snapshot-([0-9]{6,9})\.pkl", weights.name)
    return 1000 * int(found[1]) if found else 0


def _settings(
    name: str,
    recipe: Recipe,
    settled: Mapping[str, Any],
    known: Mapping[str, Any],
    found: Found,
    changed: Mapping[str, str],
) -> str:
    """Describe the origins of settings that change what is learnt, and list settings that were not taken."""
    values = {key: value for key, value in flat(recipe.model_dump()).items() if key not in changed}
    theirs = {key: value for key, value in known.items() if key in values and values[key] == value}
    ours = {key: values[key] for key in values if key in settled and key not in theirs and key.startswith(_LEARNING)}
    origins = " and ".join(settings.origin for settings in reversed(found.settings) if settings.keys)
    nearest = f"the nearest to {recipe.data.resolution} and {counted(recipe.data.num_classes, 'class')}"
    lines = [f"from {origins}:", *_listed(theirs)] if theirs else []
    lines += [f"from launch/recipes/{name}.yaml, {nearest}:", *_listed(ours)]
    lines += [f"changed, as the two do not fit: {key}{why}" for key, why in changed.items()]
    left = [name for settings in found.settings for name in settings.left]
    left += [key for key in known if key not in theirs and key != "augmentation.p"]  # an import resumes with its own p
    if left:
        more = [f"and {len(left) - _MOST_NAMES} more"] if len(left) > _MOST_NAMES else []
        lines += ["not taken:", *_wrapped(left[:_MOST_NAMES] + more)]
    return _labelled("settings:", lines)


def _state_taken(recipe: Recipe, found: Found, nimg: int, in_name: bool) -> str:
    """Describe the training state that resumes, besides the networks."""
    where = "in the snapshot" if found.nimg is not None else "in the file's name" if in_name else ""
    seen = f"{nimg} images seen, as said {where}" if where else "images seen are not known: counted from 0"
    steps = {name: counted(moments.steps, "update") for name, moments in found.moments.items()}
    optimizers = [f"Adam of the {name} resumes after {updates}" for name, updates in steps.items()]
    optimizers += [f"Adam of the {n} starts from zero ({problem})" for n, problem in found.without_moments.items()]
    ema = "the EMA is kept" if found.has_ema else "of one generator, with which the EMA begins"
    lines = [f"{seen}; {ema}", *(optimizers or ["optimizer state: none, Adam starts from zero"])]
    if found.augmentation_p is not None and recipe.augmentation and recipe.augmentation.final_p is None:
        lines.append(f"augmentation at p {recipe.augmentation.p:g}, as in the snapshot")
    return _labelled("state:", lines)


def _labelled(label: str, lines: Sequence[str]) -> str:
    return "\n".join(f"{label if i == 0 else '':<15}{line}" for i, line in enumerate(lines))


def _listed(values: Mapping[str, Any]) -> list[str]:
    """Keys and values as overrides are written."""
    shown = {key: "null" if value is None else json.dumps(value).replace(" ", "") for key, value in values.items()}
    return _wrapped([f"{key}={value}" for key, value in shown.items()])


def _wrapped(words: Sequence[str]) -> list[str]:
    return textwrap.wrap(" ".join(words), 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


class _Entry:
    """An entry of a checkpoint: whole parameters and buffers of one network."""

    def __init__(self, recipe: Recipe, name: str, state: Mapping[str, Tensor], moments: Moments | None = None) -> None:
        network = "discriminator" if name == "discriminator" else "generator"
        empty = network_on_meta(recipe, network)  # so that no memory is taken before sizes are checked
        wanted = {key: tensor.shape for key, tensor in empty.state_dict().items()}
        missing = {key for key, _ in empty.named_parameters()} - state.keys()
        other = {key for key, tensor in state.items() if tensor.shape != wanted.get(key)}
        if other or missing:
            field = "--discriminator" if network == "discriminator" else "--weights"
            problem = f"does not fit the generator's images and classes, or is not complete ({min(other | missing)})"
            raise UserError(field, None, problem, "give the two networks of one training")
        stack = build_network(recipe, network)
        initialize(stack, initial_seed(recipe, network))
        stack.load_state_dict(dict(state), strict=False)
        self._parameters, self._buffers = dict(stack.named_parameters()), checkpoint.saved_buffers(stack)
        self._moments = moments

    def parts(self) -> list[checkpoint.StateShard]:
        """Float32 parameters, buffers, and Adam's state for the parameters."""
        found = [checkpoint.StateShard(MASTER, n, 0, p.detach().float().flatten()) for n, p in self._parameters.items()]
        found += [checkpoint.StateShard(BUFFER, n, 0, b.flatten()) for n, b in self._buffers.items()]
        for kind, values in (self._moments.values if self._moments else {}).items():
            found += [checkpoint.StateShard(kind, n, 0, values[n].flatten()) for n in self._parameters]
        return found

    def numbers(self) -> dict[str, float]:
        """Updates that Adam has made."""
        return {STEP: self._moments.steps} if self._moments else {}
