"""State dicts of the public PyTorch implementation of pix2pix (Isola et al. 2017), and the sections that they fit.

Its U-Net nests each level in the one above it; ours is a flat list. Weights are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bigsgan.errors import UserError

State = Mapping[str, Tensor]

_NORM = {
    "weight": "weight",
    "bias": "bias",
    "running_mean": "statistics.running_mean",
    "running_var": "statistics.running_var",
}
_FIRST_DOWN = "model.model.0.weight"


def generator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``generator``.

    Raises:
        UserError: The state is not that of a U-Net of pix2pix.
    """
    _require(state, _FIRST_DOWN, "generator")
    return {"family": "pix2pix", "channels": state[_FIRST_DOWN].shape[0], "norm": _norm_of(state)}


def discriminator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator``.

    Raises:
        UserError: The state is not that of a PatchGAN of pix2pix.
    """
    _require(state, "model.0.weight", "discriminator")
    convolutions = [name for name, value in state.items() if name.endswith("weight") and value.dim() == 4]
    return {
        "family": "pix2pix",
        "channels": state["model.0.weight"].shape[0],
        "depth": len(convolutions) - 2,
        "norm": _norm_of(state),
    }


def data_section(state: State) -> dict[str, Any]:
    """What the generator's shapes say of the images.

    Raises:
        UserError: The state is not that of a U-Net of pix2pix.
    """
    _require(state, _FIRST_DOWN, "generator")
    return {
        "resolution": 2 ** _num_levels(state),
        "input_channels": state[_FIRST_DOWN].shape[1],
        "image_channels": state["model.model.3.weight"].shape[1],
        "num_classes": 0,
    }


def generator_state(state: State) -> dict[str, Tensor]:
    """State dict of our generator.

    Raises:
        UserError: The state is not that of a U-Net of pix2pix.
    """
    _require(state, _FIRST_DOWN, "generator")
    levels = _num_levels(state)
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
    return _renamed(state, names)


def discriminator_state(state: State) -> dict[str, Tensor]:
    """State dict of our discriminator.

    Raises:
        UserError: The state is not that of a PatchGAN of pix2pix.
    """
    depth = discriminator_section(state)["depth"]
    names = {"model.0": "0.conv", f"model.{3 * depth + 2}": f"{depth + 1}.conv"}
    for i in range(1, depth + 1):
        names |= {f"model.{3 * i - 1}": f"{i}.conv", f"model.{3 * i}": f"{i}.norm"}
    return _renamed(state, names)


def _num_levels(state: State) -> int:
    """Levels of the U-Net, each of which adds to the names of those in it."""
    return max(len(re.findall(r"model\.", name)) for name in state) - 1


def _norm_of(state: State) -> str:
    return "batch" if any(name.endswith("running_mean") for name in state) else "instance"


def _renamed(state: State, names: Mapping[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, value in state.items():
        module, _, ending = name.rpartition(".")
        if ending == "num_batches_tracked":  # which torch counts and nothing reads
            continue
        if module not in names:
            raise UserError("weights", name, "is no tensor of pix2pix's network", "give its latest_net_G.pth or _D.pth")
        ours = names[module]
        found[f"layers.{ours}.{_NORM[ending] if ours.endswith('norm') else ending}"] = value
    return found


def _require(state: State, name: str, network: str) -> None:
    if name not in state or state[name].dim() != 4:
        remedy = "give the file of that network, such as latest_net_G.pth or latest_net_D.pth"
        raise UserError("weights", None, f"hold no {network} of pix2pix: there is no {name}", remedy)
