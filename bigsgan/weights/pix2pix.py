"""State dicts of the public PyTorch implementation of pix2pix and CycleGAN, and the sections that they fit.

Its U-Net nests each level in the one above it; ours is a flat list. Weights are the same. Names tell the norm: a batch
norm has entries of its own; an instance norm has none, but the convolutions before it have biases. ``sources.SOURCES``
lists the errors raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bigsgan.errors import UserError

State = Mapping[str, Tensor]

_STATISTICS = ("running_mean", "running_var")
_UNET, _RESNET = "model.model.0", "model.1"
_PATCHES, _PIXELS = "model.0", "net.0"
"""Names of the first convolutions."""

_FIRST_BLOCK = 10
"""Number of a ResNet's first block in that project's list, after two halvings."""

_RESNET_RESOLUTION = 256
"""Resolution of an imported ResNet, whose weights fit any: the project's default."""


def generator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``generator``."""
    first = _first(state, "generator", _UNET, _RESNET)
    section = {"family": "pix2pix", "channels": len(state[f"{first}.weight"]), "norm": _norm_of(state, first)}
    if first == _UNET:
        return {**section, "architecture": "unet"}
    blocks = _num_blocks(state)
    dropout = f"model.{_FIRST_BLOCK}.conv_block.5.weight" not in state  # it moves the second convolution by one
    return {**section, "architecture": "resnet", "num_blocks": blocks, "dropout": dropout}


def discriminator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator``."""
    first = _first(state, "discriminator", _PATCHES, _PIXELS)
    channels, seen = state[f"{first}.weight"].shape[:2]
    if seen in (1, 3):
        problem = "does not read the input beside the image, as in CycleGAN's discriminators"
        raise UserError("weights", f"{first}.weight", problem, "import the generator alone, without --discriminator")
    section = {"family": "pix2pix", "architecture": "patches", "channels": channels}
    if first == _PIXELS:
        return {**section, "architecture": "pixels", "norm": _norm_of(state, "net.2")}
    convolutions = [name for name, value in state.items() if name.endswith("weight") and value.dim() == 4]
    return {**section, "depth": len(convolutions) - 2, "norm": _norm_of(state, "model.2")}


def untold(network: str, section: Mapping[str, Any], state: State) -> tuple[str, ...]:
    """Keys of a ``network``'s section that a state dict does not tell: a U-Net's dropout moves no number."""
    return ("dropout",) if network == "generator" and "dropout" not in section else ()


def data_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``data`` that follow from the generator's shapes."""
    first = _first(state, "generator", _UNET, _RESNET)
    if first == _UNET:
        resolution, image_channels = 2 ** _num_levels(state), state["model.model.3.weight"].shape[1]
    else:
        resolution, image_channels = _RESNET_RESOLUTION, len(state[f"model.{_last(state)}.weight"])
    return {
        "resolution": resolution,
        "input_channels": state[f"{first}.weight"].shape[1],
        "image_channels": image_channels,
        "num_classes": 0,
    }


def generator_state(state: State) -> dict[str, Tensor]:
    """State dict of our generator."""
    section = generator_section(state)
    levels = _num_levels(state) if section["architecture"] == "unet" else _last(state)  # which a ResNet must have
    return _renamed(state, _generator_names(section, levels))


def discriminator_state(state: State) -> dict[str, Tensor]:
    """State dict of our discriminator."""
    return _renamed(state, _discriminator_names(discriminator_section(state)))


def exported(network: str, section: Mapping[str, Any], data: Mapping[str, int], state: State) -> dict[str, Tensor]:
    """The inverse of ``generator_state`` and ``discriminator_state``; a U-Net's resolution tells its levels alone."""
    levels = data["resolution"].bit_length() - 1
    names = _generator_names(section, levels) if network == "generator" else _discriminator_names(section)
    theirs, found = {ours: name for name, ours in names.items()}, {}
    for name, value in state.items():
        module, _, ending = name.removeprefix("layers.").replace(".statistics.", ".").rpartition(".")
        found[f"{theirs[module]}.{ending}"] = value
        if ending == "running_var":
            found[f"{theirs[module]}.num_batches_tracked"] = torch.tensor(0)
    return found


def opened(network: str, section: Mapping[str, Any], data: Mapping[str, int]) -> str:
    """The call of the project's class for such weights."""
    norm = f"norm_layer=networks.get_norm_layer({section['norm']!r})"
    inputs, images, width = data["input_channels"], data["image_channels"], section["channels"]
    if network == "discriminator":
        if section["architecture"] == "pixels":
            return f"networks.PixelDiscriminator({inputs + images}, {width}, {norm})"
        return f"networks.NLayerDiscriminator({inputs + images}, {width}, {section['depth']}, {norm})"
    more = f"{width}, {norm}, use_dropout={section['dropout']}"
    if section["architecture"] == "unet":
        return f"networks.UnetGenerator({inputs}, {images}, {data['resolution'].bit_length() - 1}, {more})"
    return f"networks.ResnetGenerator({inputs}, {images}, {more}, n_blocks={section['num_blocks']})"


def _discriminator_names(section: Mapping[str, Any]) -> dict[str, str]:
    """Our names of the discriminator's modules, by that project's."""
    if section["architecture"] == "pixels":
        return {"net.0": "0.conv", "net.2": "1.conv", "net.3": "1.norm", "net.5": "2.conv"}
    depth = section["depth"]
    names = {"model.0": "0.conv", f"model.{3 * depth + 2}": f"{depth + 1}.conv"}
    for i in range(1, depth + 1):
        names |= {f"model.{3 * i - 1}": f"{i}.conv", f"model.{3 * i}": f"{i}.norm"}
    return names


def _generator_names(section: Mapping[str, Any], levels: int) -> dict[str, str]:
    """Our names of the generator's modules, by that project's; a U-Net has ``levels``."""
    if section["architecture"] == "resnet":
        return _resnet_names(section["num_blocks"], section["dropout"])
    names = {"model.model.0": "0.conv", "model.model.3": f"{2 * levels - 1}.conv"}
    prefix = "model.model.1.model."
    for level in range(1, levels):
        down, up = level, 2 * levels - 1 - level
        if level < levels - 1:
            numbers = {"1": f"{down}.conv", "2": f"{down}.norm", "5": f"{up}.conv", "6": f"{up}.norm"}
        else:
            numbers = {"1": f"{down}.conv", "3": f"{up}.conv", "4": f"{up}.norm"}
        names |= {prefix + number: name for number, name in numbers.items()}
        prefix += "3.model."
    return names


def _resnet_names(blocks: int, dropout: bool) -> dict[str, str]:
    last, second = _FIRST_BLOCK + blocks + 7, 6 if dropout else 5
    layers = {1: 0, 4: 1, 7: 2, last - 7: blocks + 3, last - 4: blocks + 4}
    names = {f"model.{number}": f"{ours}.conv" for number, ours in {**layers, last: blocks + 5}.items()}
    names |= {f"model.{number + 1}": f"{ours}.norm" for number, ours in layers.items()}
    for i in range(blocks):
        theirs, ours = f"model.{_FIRST_BLOCK + i}.conv_block", 3 + i
        names |= {f"{theirs}.1": f"{ours}.conv1", f"{theirs}.2": f"{ours}.norm1"}
        names |= {f"{theirs}.{second}": f"{ours}.conv2", f"{theirs}.{second + 1}": f"{ours}.norm2"}
    return names


def _num_levels(state: State) -> int:
    """Number of the U-Net's levels; each adds a ``model.`` to the names of the levels in it."""
    return max(len(re.findall(r"model\.", name)) for name in state) - 1


def _num_blocks(state: State) -> int:
    found = {int(match[1]) for name in state if (match := re.match(r"model\.(\d{1,4})\.conv_block\.", name))}
    if found != set(range(_FIRST_BLOCK, _FIRST_BLOCK + len(found))) or not found:
        problem = "does not come after two halvings, as in pix2pixHD, which is not supported"
        remedy = "give a U-Net or ResNet of pix2pix or CycleGAN"
        raise UserError("weights", f"model.{_FIRST_BLOCK}.conv_block", problem, remedy)
    return len(found)


def _last(state: State) -> int:
    """Number of a ResNet's last convolution: two doublings and a padding come after the blocks."""
    last = _FIRST_BLOCK + _num_blocks(state) + 7
    _first(state, "generator", f"model.{last}")
    return last


def _norm_of(state: State, convolution: str) -> str:
    """The network's norm; ``convolution`` is one that has a bias only before an instance norm."""
    if any(_is_batch_norm(state, name.removesuffix(".running_mean")) for name in state):
        return "batch"
    return "instance" if f"{convolution}.bias" in state else "none"


def _is_batch_norm(state: State, module: str) -> bool:
    """Whether a module has running statistics and a gain; before torch 0.4 instance norms had unused statistics."""
    return f"{module}.running_mean" in state and f"{module}.weight" in state


def _renamed(state: State, names: Mapping[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, value in state.items():
        module, _, ending = name.rpartition(".")
        if ending == "num_batches_tracked" or (ending in _STATISTICS and not _is_batch_norm(state, module)):
            continue  # nothing reads them
        if module not in names:
            remedy = "give its latest_net_G.pth or latest_net_D.pth"
            raise UserError("weights", name, "is not a tensor of pix2pix", remedy)
        is_of_norm = ending in _STATISTICS and re.search(r"norm\d?$", names[module])
        found[f"layers.{names[module]}.{'statistics.' if is_of_norm else ''}{ending}"] = value
    return found


def _first(state: State, network: str, *names: str) -> str:
    """The first of these convolutions that exists; the ``network`` must have one of them."""
    for name in names:
        if f"{name}.weight" in state and state[f"{name}.weight"].dim() == 4:
            return name
    remedy = "give the file of that network, such as latest_net_G.pth or latest_net_D.pth"
    raise UserError("weights", None, f"must be a pix2pix {network}, which has {names[0]}.weight", remedy)
